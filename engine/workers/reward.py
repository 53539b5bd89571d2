"""The rewards: functions of a response and its ground truth, run beside whatever their process does."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from engine.batch import Batch
from engine.config import RewardConfig
from engine.control.dispatch import ALL, DATA_PARALLEL, RANK_ZERO, register
from engine.rewards.scoring import score
from engine.workers.base import Worker

Finished = tuple[str, int, str]
"""Prompt set, position in it, response: what a score is a function of."""


class RewardWorker(Worker):
    """One rank of the reward functions. Uses neither a device nor collectives."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._reward = RewardConfig()
        self._ahead: dict[Finished, float] = {}

    @register(ALL, beside=True)
    def use(self, config: RewardConfig) -> None:
        """How to score from now on."""
        self._reward = config
        self._ahead.clear()

    def score_ahead(self, finished: list[Finished]) -> None:
        """Scores responses of a rollout that still goes on; `score` then finds them done."""
        for sample in finished:
            self._score(sample)

    @register(DATA_PARALLEL, beside=True)
    def score(self, rollout: Batch) -> Batch:
        """The score of each response, as the tensors reward and outcome [B] float32.

        Raises what the reward function raises, naming reward and prompt. With greedy answers also theirs, as the tensor greedy_reward [B] float32.
        """
        name, places = rollout.meta["prompt_set"], rollout.tensors["prompt"].tolist()
        scored = {"reward": "response", "greedy_reward": "greedy_response"}
        scores = {
            column: [self._score((name, place, response)) for place, response in zip(places, rollout.objects[responses], strict=True)]
            for column, responses in scored.items()
            if responses in rollout.objects
        }
        self._ahead.clear()
        tensors = {column: torch.tensor(values, dtype=torch.float32) for column, values in scores.items()}
        return Batch(tensors={**tensors, "outcome": tensors["reward"]})

    @register(RANK_ZERO, beside=True)
    def combine(self, scores: Batch, weights: Mapping[str, float], shuffle_seed: tuple[int, ...] | None) -> Batch:
        """The step's rewards: the functions' scores plus each annotator's score by its weight; for a control arm dealt out at random.

        Rewards of greedy answers stay as they are, and the column outcome is what the functions gave.
        """
        total = scores.tensors["reward"].double()
        for annotator, weight in weights.items():
            total = total + weight * scores.tensors[f"{annotator}/score"].double()
        if shuffle_seed is not None:
            total = total[torch.from_numpy(np.random.default_rng(shuffle_seed).permutation(len(total)))]
        kept = {name: scores.tensors[name] for name in ("greedy_reward",) if name in scores.tensors}
        return Batch(tensors={**kept, "reward": total.float(), "outcome": scores.tensors["reward"]})

    def _score(self, sample: Finished) -> float:
        if sample not in self._ahead:
            prompt_set, position, response = sample
            (self._ahead[sample],) = score(self._reward, [response], [self.prompt_sets[prompt_set].prompts[position]])
        return self._ahead[sample]

"""The rewards: functions of a response and its ground truth, run in processes of their own beside whatever this process does."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from engine.batch import Batch
from engine.config import RewardConfig
from engine.control.dispatch import ALL, DATA_PARALLEL, RANK_ZERO, register
from engine.rewards.scoring import Pending, Scored, Scoring, against, check_failures
from engine.workers.base import Worker

Finished = tuple[str, int, str, int, bool]
"""Prompt set, position in it, response, its tokens, whether it came to its end: what a score is a function of."""


class RewardWorker(Worker):
    """One rank of the reward functions. Uses neither a device nor collectives."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._reward = RewardConfig()
        self._scoring: Scoring | None = None
        self._ahead: dict[Finished, Pending] = {}

    @register(ALL, beside=True)
    def use(self, config: RewardConfig) -> None:
        """How to score from now on. Raises `RewardError` where a function cannot be loaded, or a known answer gets another score."""
        self._reward = config
        self._ahead.clear()
        needed = config.model_copy(update={"shuffle": False})
        if self._scoring is None or self._scoring.config != needed:
            self.close()
            self._scoring = Scoring(needed)
        self._scoring.check(self._scoring.begin_canaries())

    def score_ahead(self, finished: list[Finished]) -> None:
        """Begins to score responses of a rollout that still goes on; `score` then finds them done."""
        for sample in finished:
            self._begin(sample)

    @register(DATA_PARALLEL, beside=True)
    def score(self, rollout: Batch) -> Batch:
        """The score of each response.

        Returns the tensors reward and outcome [B] float32, outcome being without what merely shapes the reward; objects: reward_status (`ok`,
        `timeout` or `error`), reward_parts (numbers by name) and reward_reason (of a failure). With greedy answers also their scores, as the tensor
        greedy_reward [B] float32; a sample whose greedy answer has no score is a failure too. Raises `RewardError` where known answers come out
        wrong, or more samples fail than a whole step may.
        """
        assert self._scoring is not None, "score was called before use"
        canaries = self._scoring.begin_canaries()
        pending = self._begin_rows(rollout, "response", "response_tokens", "finished")
        answers = self._begin_rows(rollout, "greedy_response", "greedy_tokens", "greedy_finished") if "greedy_response" in rollout.objects else None
        self._ahead.clear()
        scored: list[Scored] = []
        greedy: list[Scored] = []
        for row, sample in enumerate(pending):
            scored.append(self._scoring.result(sample))
            if answers is not None:
                greedy.append(self._scoring.result(answers[row]))
                scored[-1] = against(scored[-1], greedy[-1])
            # When these are too many for the samples of all ranks, nobody needs to wait for the others.
            check_failures(scored, self._reward.max_failure_fraction * len(pending) * self.ranks)
        self._scoring.check(canaries)
        columns = {"reward": [sample.reward for sample in scored], "outcome": [sample.outcome for sample in scored]}
        if answers is not None:
            columns["greedy_reward"] = [sample.reward for sample in greedy]
        return Batch(
            {name: torch.tensor(values, dtype=torch.float32) for name, values in columns.items()},
            {
                "reward_status": [sample.status for sample in scored],
                "reward_parts": [dict(sample.parts) for sample in scored],
                "reward_reason": [sample.reason for sample in scored],
            },
        )

    @register(RANK_ZERO, beside=True)
    def combine(self, scores: Batch, weights: Mapping[str, float], shuffle_seed: tuple[int, ...] | None) -> Batch:
        """The step's rewards: the functions' scores plus each annotator's score by its weight; for a control arm dealt out at random.

        Rewards of greedy answers stay as they are, and the column outcome is as the functions gave it. A sample without a score has 0, and with
        `on_failure: exclude` is False in the column kept [B]. Raises `RewardError` where too many samples have none.
        """
        reasons = scores.objects["reward_reason"]
        scored = [Scored(0.0, status, reason=reason) for status, reason in zip(scores.objects["reward_status"], reasons, strict=True)]
        check_failures(scored, self._reward.max_failure_fraction * len(scored))
        total = scores.tensors["reward"].double()
        for annotator, weight in weights.items():
            total = total + weight * scores.tensors[f"{annotator}/score"].double()
        earns = torch.tensor([sample.status == "ok" for sample in scored], dtype=torch.bool)
        total = torch.where(earns, total, 0)
        if shuffle_seed is not None:
            # Among those that count: a 0 that stands for nothing known must not be dealt to another sample.
            chosen = (earns if self._reward.on_failure == "exclude" else torch.ones_like(earns)).nonzero()[:, 0]
            total[chosen] = total[chosen[torch.from_numpy(np.random.default_rng(shuffle_seed).permutation(len(chosen)))]]
        columns = {name: scores.tensors[name] for name in ("greedy_reward",) if name in scores.tensors}
        if self._reward.on_failure == "exclude":
            columns["kept"] = earns
        told = ("reward_status", "reward_parts", "reward_reason")
        return Batch({**columns, "reward": total.float(), "outcome": scores.tensors["outcome"]}, {name: scores.objects[name] for name in told})

    def close(self) -> None:
        """Ends the processes of the rewards."""
        if self._scoring is not None:
            self._scoring.close()
            self._scoring = None

    def _begin_rows(self, rollout: Batch, responses: str, tokens: str, finished: str) -> list[Pending]:
        rows = zip(
            rollout.tensors["prompt"].tolist(),
            rollout.objects[responses],
            *(rollout.tensors[name].tolist() for name in (tokens, finished)),
            strict=True,
        )
        return [self._begin((rollout.meta["prompt_set"], *row)) for row in rows]

    def _begin(self, sample: Finished) -> Pending:
        assert self._scoring is not None, "samples came before use"
        if sample not in self._ahead:
            prompt_set, position, response, tokens, finished = sample
            self._ahead[sample] = self._scoring.begin(self.prompt_sets[prompt_set].prompts[position], response, tokens, finished)
        return self._ahead[sample]

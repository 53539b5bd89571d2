"""Rescue of groups in which every sample is wrong, from a memory of right responses to the same prompt (POLARIS, An et al. 2025, blog).

A remembered response keeps every column that it had, its rollout's log-probs and weight version among them: the policy that drew it is an older
one, and whoever corrects for that finds what it needs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, concat
from engine.config import RescueConfig


class RescueMemory:
    """The last right responses to each prompt of a stage."""

    def __init__(self, config: RescueConfig) -> None:
        self._config = config
        self._responses: dict[int, list[Batch]] = {}
        """By prompt, the one whose newest response is oldest first; batches of one row, no wider than it is long."""

    def __call__(self, batch: Batch, seed: Sequence[int]) -> Batch:
        """Remembers the right responses of a step, and puts remembered ones into its groups without any.

        Args:
            batch: columns of whole groups; prompt, sample, outcome, response_tokens [B] and the token columns among them.
            seed: of the choice of the sample that goes and of the response that comes.

        Returns:
            The batch, at most one row of each all-wrong group being a remembered response with all its columns, and the column `rescued` [B] bool
            that says which. Only `sample`, and what is said of a greedy answer to the prompt, is that of the row that goes.
        """
        right = (batch.tensors["outcome"] > self._config.right_above) & (batch.tensors["response_tokens"] > 0)
        replaced = self._replacements(batch.tensors["prompt"], right, np.random.default_rng(list(seed)))
        self._remember(batch, right)
        order = torch.arange(len(batch))
        for number, row in enumerate(replaced):
            order[row] = len(batch) + number
        whole = concat([batch, *replaced.values()]).rows(order) if replaced else batch
        stay = {name: column for name, column in batch.tensors.items() if name == "sample" or name.startswith("greedy_")}
        return whole.with_tensors(**stay, rescued=order >= len(batch))

    def state(self) -> dict[int, list[Batch]]:
        """What `load_state` takes."""
        return {prompt: list(responses) for prompt, responses in self._responses.items()}

    def load_state(self, state: dict[int, list[Batch]]) -> None:
        """What `state` gave."""
        self._responses = {prompt: list(responses) for prompt, responses in state.items()}

    def _replacements(self, prompts: Tensor, right: Tensor, generator: np.random.Generator) -> dict[int, Batch]:
        """The response that replaces each row that goes, groups in the order of their first rows."""
        rows: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompts.tolist()):
            rows.setdefault(prompt, []).append(row)
        helpless = [prompt for prompt, of_prompt in rows.items() if prompt in self._responses and not right[of_prompt].any()]
        return {_one(rows[prompt], generator): _one(self._responses[prompt], generator) for prompt in helpless}

    def _remember(self, batch: Batch, right: Tensor) -> None:
        for row in right.nonzero().squeeze(1).tolist():
            prompt = int(batch.tensors["prompt"][row])
            response = batch.rows(torch.tensor([row]))
            fresh = [*self._responses.pop(prompt, []), response.padded_to(int(response.tensors["attention_mask"].sum()))]
            self._responses[prompt] = fresh[-self._config.responses_per_prompt :]
        for prompt in list(self._responses)[: max(0, len(self._responses) - self._config.max_prompts)]:
            del self._responses[prompt]


def _one(of: Sequence[Any], generator: np.random.Generator) -> Any:
    return of[int(generator.integers(len(of)))]

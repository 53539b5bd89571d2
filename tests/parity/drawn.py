"""Random steps in the forms that Almanac, verl and TRL take them."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

SEEDS = range(5)
TOKENS = 40


@dataclass(frozen=True)
class Step:
    """One step of B samples; token tensors are [B, TOKENS] float64, and hold what they like outside the mask."""

    rewards: Tensor
    group: Tensor
    mask: Tensor
    log_probs: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    reference_log_probs: Tensor
    advantages: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    squared_probabilities: Tensor
    greedy_rewards: Tensor

    @property
    def rewards_on_last_token(self) -> Tensor:
        """[B, TOKENS]: how verl is given an outcome. Of a sample without a response token it stands on the first column, as verl's own does."""
        last = (self.mask * torch.arange(TOKENS)).argmax(dim=1)
        return torch.zeros(self.mask.shape, dtype=self.rewards.dtype).scatter(1, last[:, None], self.rewards[:, None])

    @property
    def uids(self) -> np.ndarray:
        """[B] of strings: how verl is told the groups."""
        return np.array([f"prompt-{number}" for number in self.group.tolist()], dtype=object)


def step(seed: int, sizes: tuple[int, ...] = (4, 2, 5, 3, 4), contiguous: bool = False, observations: bool = True, empty: int = 0) -> Step:
    """Groups of these sizes, shuffled unless `contiguous`; rewards with ties, zeros and negative ones, one group of equal rewards.

    `observations` puts spans without a response token between response tokens; the first `empty` rows have none at all.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    rewards = torch.randint(-2, 3, (rows,), generator=generator).double() / 2
    rewards += torch.where(group % 2 == 0, torch.randn(rows, generator=generator, dtype=torch.float64), 0)
    rewards[group == len(sizes) - 1] = 0.1
    order = torch.arange(rows) if contiguous else torch.randperm(rows, generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (rows, 1), generator=generator)
    mask = torch.arange(TOKENS) < lengths
    if observations:
        mask &= (torch.rand(rows, TOKENS, generator=generator) < 0.7) | (torch.arange(TOKENS) == lengths - 1)
    mask[:empty] = False

    def normal(scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return mean + scale * torch.randn(rows, TOKENS, generator=generator, dtype=torch.float64)

    old = -normal().abs() - 0.05
    values = normal()
    return Step(
        rewards=rewards[order],
        group=group[order] * 7 + 3,  # numbers of prompts, not 0, 1, 2
        mask=mask,
        log_probs=old + normal(0.4),
        old_log_probs=old,
        rollout_log_probs=old + normal(0.4),
        reference_log_probs=old + normal(0.3),
        advantages=normal(),
        values=values + normal(0.4),
        old_values=values,
        returns=values + normal(0.8),
        squared_probabilities=torch.rand(rows, TOKENS, generator=generator, dtype=torch.float64),
        greedy_rewards=torch.randn(len(sizes), generator=generator, dtype=torch.float64)[group[order]],
    )


def same(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> None:
    """Equal up to rounding in float64, relative to the larger of 1 and the value."""
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=tolerance, atol=tolerance)


def differ(ours: Tensor, theirs: Tensor) -> None:
    """They are further apart than any rounding: the difference that docs/parity.md describes is still there."""
    with pytest.raises(AssertionError, match="not close"):
        same(ours, theirs, tolerance=1e-3)

"""The one place that turns per-token loss terms into a scalar, with denominators of the whole optimizer step.

A mean over a micro-batch weighs a token by how much happened to stand beside it. Here every micro-batch's sum is divided by the counts of
the *whole* step (all micro-batches, all data-parallel ranks), known before the first backward; the scalars of the parts then add up to
the step's loss, and so do their gradients, however the batch was cut.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Denominators:
    """What one optimizer step holds, over all its micro-batches and ranks."""

    tokens: int
    """Response tokens."""
    sequences: int
    """Samples with at least one response token."""

    def __add__(self, other: Self) -> Self:
        return type(self)(self.tokens + other.tokens, self.sequences + other.sequences)


def count(mask: Tensor) -> Denominators:
    """Denominators of the rows of `mask` [B, T] bool; those of a step are the sum over all ranks."""
    # Not `sum`: of a bool tensor it is taken in int64, twenty times as slow on a CPU.
    return Denominators(tokens=int(mask.count_nonzero()), sequences=int(mask.any(dim=-1).count_nonzero()))


def aggregate(per_token: Tensor, mask: Tensor, denominators: Denominators, how: str, constant: int | None = None) -> Tensor:
    """This part's share of the step's loss; the shares of all parts of all ranks add up to it.

    A backend that averages gradients over N ranks must multiply the share by N before `backward`.

    Args:
        per_token: [B, T] terms; what stands outside the mask has no effect on the value.
        mask: [B, T] bool, True on response tokens.
        denominators: counts of the whole optimizer step.
        how: `token_mean`, sum over tokens of the step (DAPO, arXiv:2503.14476); `sequence_mean_token_sum`, mean over sequences of the sum;
            `sequence_mean_token_mean`, mean over sequences of their mean (GRPO, arXiv:2402.03300); `sequence_sum_constant`,
            sum / (sequences x constant) (Dr. GRPO, arXiv:2503.20783). Sequences without a response token count nowhere.
        constant: tokens, for `sequence_sum_constant` alone.

    Returns:
        A scalar; 0 with a gradient of 0 where the step has no response token.
    """
    if how not in _AGGREGATIONS:
        raise ValueError(f"no aggregation is called {how!r}. There are: {', '.join(names())}")
    if (how == "sequence_sum_constant") != (constant is not None):
        raise ValueError("aggregation_constant_tokens goes with aggregation=sequence_sum_constant, and only with it")
    return _AGGREGATIONS[how](torch.where(mask, per_token, 0), mask, denominators, constant or 1)


def names() -> list[str]:
    """All aggregations."""
    return sorted(_AGGREGATIONS)


# The sums below are exactly 0 where there is nothing to count: `max(1, ...)` then makes the mean 0 and changes no other value.
def _token_mean(terms: Tensor, mask: Tensor, denominators: Denominators, constant: int) -> Tensor:
    return terms.sum() / max(1, denominators.tokens)


def _sequence_mean_token_sum(terms: Tensor, mask: Tensor, denominators: Denominators, constant: int) -> Tensor:
    return terms.sum() / max(1, denominators.sequences)


def _sequence_mean_token_mean(terms: Tensor, mask: Tensor, denominators: Denominators, constant: int) -> Tensor:
    # A sequence is never divided between parts, so its own length is known here.
    return (terms.sum(dim=-1) / mask.sum(dim=-1, dtype=torch.int32).clamp(min=1)).sum() / max(1, denominators.sequences)


def _sequence_sum_constant(terms: Tensor, mask: Tensor, denominators: Denominators, constant: int) -> Tensor:
    return terms.sum() / (max(1, denominators.sequences) * constant)


_AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Denominators, int], Tensor]] = {
    "token_mean": _token_mean,
    "sequence_mean_token_sum": _sequence_mean_token_sum,
    "sequence_mean_token_mean": _sequence_mean_token_mean,
    "sequence_sum_constant": _sequence_sum_constant,
}

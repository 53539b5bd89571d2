"""What the policy losses share: the ratio to an older policy, PPO's clip of it, and the shares of tokens that a bound cuts off."""

import torch
from torch import Tensor

from engine.metrics import Mean, Statistics

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8, far beyond every clip; a larger log-ratio could only overflow."""


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """d = log_probs - old_log_probs [B, T], clamped to +-20, where there is no gradient; 0 outside the mask."""
    # Excluding before `exp`: multiplying its result by a mask would turn a masked inf into NaN, in the gradient too.
    return torch.where(mask, log_probs - old_log_probs, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A rho, -A clip(rho, 1 - low, 1 + high)) [B, T], and by metric which tokens' gradients the bounds cut off: below (A < 0), above (A > 0)."""
    terms = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    cut = {
        "policy/clip_fraction_low": (advantages < 0) & (ratio < 1 - low),
        "policy/clip_fraction_high": (advantages > 0) & (ratio > 1 + high),
    }
    return terms, cut


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the response tokens of each row, [B, 1]; 0 for a row without any."""
    return torch.where(mask, values, 0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True, dtype=torch.int32).clamp(min=1)


def fractions(cut: dict[str, Tensor], mask: Tensor) -> Statistics:
    """Share of all response tokens that each [B, T] bool holds, by metric; what it holds outside the mask does not count."""
    counts = [(tokens & mask).count_nonzero() for tokens in cut.values()]
    *totals, tokens = torch.stack([*counts, mask.count_nonzero()]).tolist()  # one wait for the device
    statistics = Statistics()
    for name, total in zip(cut, totals, strict=True):
        statistics.add(name, Mean(total, tokens))
    return statistics

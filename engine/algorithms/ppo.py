"""Clipped policy loss.

PPO, Schulman et al. 2017, arXiv:1707.06347, equation 7; asymmetric bounds: DAPO, arXiv:2503.14476, section 3.1; dual clip: Ye et al. 2019,
arXiv:1912.09729, equation 5. Left out: the value and entropy terms.
"""

import torch
from torch import Tensor

from engine.algorithms.types import LossInputs, LossTerms
from engine.config import LossConfig
from engine.metrics import Mean, Statistics

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8, far beyond every clip; a larger log-ratio could only overflow."""


def loss(inputs: LossInputs, config: LossConfig) -> LossTerms:
    """Clipped policy loss, with asymmetric bounds and dual clip.

    max(-A rho, -A clip(rho, 1 - low, 1 + high)), and for A < 0 at most -A c; rho = exp(log_probs - old_log_probs), the difference
    clamped to +-20; c is `dual_clip`.

    Returns:
        Terms [B, T], 0 outside the mask; shares of response tokens whose gradient a bound cuts off, over all response tokens:
        `policy/clip_fraction_low` (A < 0, rho below), `policy/clip_fraction_high` (A > 0, rho above), `policy/clip_fraction_dual`.
    """
    # Excluding before `exp`: multiplying its result by a mask would turn a masked inf into NaN, in the gradient too.
    log_ratio = torch.where(inputs.mask, inputs.log_probs - inputs.old_log_probs, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = torch.where(inputs.mask, inputs.advantages, 0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    terms = torch.maximum(unclipped, -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high))
    cut = {
        "policy/clip_fraction_low": (advantages < 0) & (ratio < 1 - config.clip_low),
        "policy/clip_fraction_high": (advantages > 0) & (ratio > 1 + config.clip_high),
    }
    if config.dual_clip is not None:
        bound = -advantages * config.dual_clip
        cut["policy/clip_fraction_dual"] = (advantages < 0) & (terms > bound)
        terms = torch.where(advantages < 0, torch.minimum(terms, bound), terms)
    return LossTerms(per_token=terms, statistics=_fractions(cut, inputs.mask))


def _fractions(cut: dict[str, Tensor], mask: Tensor) -> Statistics:
    *totals, tokens = torch.stack([*(tokens.sum() for tokens in cut.values()), mask.sum()]).tolist()  # one wait for the device, not four
    statistics = Statistics()
    for name, total in zip(cut, totals, strict=True):
        statistics.add(name, Mean(total, tokens))
    return statistics

"""Clipped policy loss.

PPO, Schulman et al. 2017, arXiv:1707.06347, equation 7; asymmetric bounds: DAPO, arXiv:2503.14476, section 3.1; dual clip: Ye et al. 2019,
arXiv:1912.09729, equation 5. Left out: the value and entropy terms.
"""

import torch

from engine.algorithms.ratio import clipped, fractions, log_ratio
from engine.algorithms.types import LossInputs, LossTerms
from engine.config.loss import ClippedLossSettings


def loss(inputs: LossInputs, config: ClippedLossSettings) -> LossTerms:
    """Clipped policy loss, with asymmetric bounds and dual clip.

    max(-A rho, -A clip(rho, 1 - low, 1 + high)), and for A < 0 at most -A c; rho = exp(log_probs - old_log_probs), the difference
    clamped to +-20; c is `dual_clip`.

    Returns:
        Terms [B, T], 0 outside the mask; shares of response tokens whose gradient a bound cuts off, over all response tokens:
        `policy/clip_fraction_low` (A < 0, rho below), `policy/clip_fraction_high` (A > 0, rho above), `policy/clip_fraction_dual`.
    """
    advantages = torch.where(inputs.mask, inputs.advantages, 0)
    ratio = log_ratio(inputs.log_probs, inputs.old_log_probs, inputs.mask).exp()
    terms, cut = clipped(ratio, advantages, config.clip_low, config.clip_high)
    if config.dual_clip is not None:
        bound = -advantages * config.dual_clip
        cut["policy/clip_fraction_dual"] = (advantages < 0) & (terms > bound)
        terms = torch.where(advantages < 0, torch.minimum(terms, bound), terms)
    return LossTerms(per_token=terms, statistics=fractions(cut, inputs.mask))

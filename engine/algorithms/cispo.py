"""Clipped importance sampling policy optimization: the importance weight is clipped, the gradient never is.

MiniMax 2025, arXiv:2506.13585, equations 4 and 5: rare tokens, whose ratios move most, keep learning.
"""

import torch

from engine.algorithms.ratio import fractions, log_ratio
from engine.algorithms.types import LossInputs, LossTerms
from engine.config import CISPOLossConfig


def loss(inputs: LossInputs, config: CISPOLossConfig) -> LossTerms:
    """REINFORCE with a clipped importance weight.

    -sg(clip(rho, 1 - low, 1 + high)) A lp, rho = exp(lp - olp), the difference clamped to +-20; without `clip_low` there is no lower bound.

    Returns:
        Terms [B, T], 0 outside the mask; shares of response tokens whose weight a bound changes, whatever their advantage:
        `policy/clip_fraction_low`, `policy/clip_fraction_high`.
    """
    advantages, log_probs = (torch.where(inputs.mask, tensor, 0) for tensor in (inputs.advantages, inputs.log_probs))
    ratio = log_ratio(inputs.log_probs.detach(), inputs.old_log_probs, inputs.mask).exp()
    low, high = 0.0 if config.clip_low is None else 1 - config.clip_low, 1 + config.clip_high
    cut = {"policy/clip_fraction_low": ratio < low, "policy/clip_fraction_high": ratio > high}
    return LossTerms(per_token=-ratio.clamp(low, high) * advantages * log_probs, statistics=fractions(cut, inputs.mask))

"""Geometric-Mean Policy Optimization: the geometric mean of the tokens' clipped ratios.

Zhao et al. 2025, arXiv:2507.20673, equation 4: each token is clipped before the mean, so that one outlier does not decide for its sequence.
"""

import torch

from engine.algorithms.ratio import fractions, log_ratio, sequence_mean
from engine.algorithms.types import LossInputs, LossTerms
from engine.config import GMPOLossConfig


def loss(inputs: LossInputs, config: GMPOLossConfig) -> LossTerms:
    """Advantage x geometric mean of the tokens' clipped ratios.

    e = sgn(A) min(sgn(A) d, sgn(A) clip(d, -low, high)), d = lp - olp clamped to +-20; -A_seq exp(mean_t e) for the sequence, A_seq the mean of its
    tokens' advantages. Every token carries the sequence's term, so that `sequence_mean_token_mean` gives the mean over sequences.

    Returns:
        Terms [B, T], 0 outside the mask; shares of response tokens whose gradient a bound cuts off: `policy/clip_fraction_low` (A < 0),
        `policy/clip_fraction_high` (A > 0).
    """
    advantages = torch.where(inputs.mask, inputs.advantages, 0)
    difference, sign = log_ratio(inputs.log_probs, inputs.old_log_probs, inputs.mask), advantages.sign()
    kept = sign * torch.minimum(sign * difference, sign * difference.clamp(-config.clip_low, config.clip_high))
    term = -sequence_mean(advantages, inputs.mask) * sequence_mean(kept, inputs.mask).exp()
    cut = {
        "policy/clip_fraction_low": (advantages < 0) & (difference < -config.clip_low),
        "policy/clip_fraction_high": (advantages > 0) & (difference > config.clip_high),
    }
    return LossTerms(per_token=torch.where(inputs.mask, term, 0), statistics=fractions(cut, inputs.mask))

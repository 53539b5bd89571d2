"""Group Sequence Policy Optimization: one ratio a sequence, clipped as PPO's.

Zheng et al. 2025, arXiv:2507.18071, equations 5 and 7, in the token form of equations 13 and 14, which also takes advantages by token.
"""

import torch

from engine.algorithms.ratio import clipped, fractions, sequence_mean
from engine.algorithms.types import LossInputs, LossTerms
from engine.config import GSPOLossConfig

MAX_LOG_RATIO = 10.0


def loss(inputs: LossInputs, config: GSPOLossConfig) -> LossTerms:
    """PPO's clip on the sequence's ratio, the geometric mean of its tokens'.

    max(-A s, -A clip(s, 1 - low, 1 + high)), s = exp(min(lp - sg(lp) + sg(mean_t d), 10)), d = lp - olp: the value is the sequence's on every
    token, the gradient each token's own. With `sequence_mean_token_mean` the step's loss is the paper's, the mean over sequences.

    Returns:
        Terms [B, T], 0 outside the mask; shares of response tokens whose gradient a bound cuts off: `policy/clip_fraction_low` (A < 0),
        `policy/clip_fraction_high` (A > 0). All tokens of a sequence are cut together.
    """
    mask = inputs.mask
    log_probs, advantages = torch.where(mask, inputs.log_probs, 0), torch.where(mask, inputs.advantages, 0)
    log_ratio = sequence_mean(inputs.log_probs.detach() - inputs.old_log_probs, mask)
    ratio = (log_probs - log_probs.detach() + log_ratio).clamp(max=MAX_LOG_RATIO).exp()
    terms, cut = clipped(ratio, advantages, config.clip_low, config.clip_high)
    return LossTerms(per_token=terms, statistics=fractions(cut, mask))

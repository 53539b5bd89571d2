"""Correction for a rollout engine that draws from another distribution than the trainer computes.

Truncated importance weights: Ionides 2008, "Truncated Importance Sampling", J. Comput. Graph. Stat. 17(2); between trainer and rollout engine of a
language model: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". The geometric mean is GSPO's length
normalisation, arXiv:2507.18071, equation 6. Left out: weights that are normalised over the batch, which would couple samples of different prompts.
"""

import torch
from torch import Tensor

from engine.algorithms.kl import MAX_LOG_RATIO
from engine.config import ImportanceWeightsConfig, OffPolicyConfig, RejectionConfig
from engine.metrics import Mean, Statistics


def ratios(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, level: str) -> Tensor:
    """What the trainer's distribution makes of tokens that the rollout drew: trainer's over rollout's probability.

    With d = old_log_probs - rollout_log_probs: `token` exp(d_t); `sequence` exp(sum_t d_t), of the response as a whole; `geometric`
    exp(mean_t d_t). Exponents are clamped to +-20.

    Args:
        old_log_probs: [B, T] of the policy at the start of the step, by the trainer.
        rollout_log_probs: [B, T] as the rollout engine reported them.
        mask: [B, T] bool. Whatever stands elsewhere, -inf and NaN included, has no effect.
        level: token, sequence or geometric.

    Returns:
        [B, T] float64, the same for all tokens of a response unless `level` is token; 1 outside the mask. ValueError for another level.
    """
    difference = torch.where(mask, old_log_probs.double() - rollout_log_probs.double(), 0)
    if level == "sequence":
        difference = torch.where(mask, difference.sum(dim=1, keepdim=True), 0)
    elif level == "geometric":
        difference = torch.where(mask, difference.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True, dtype=torch.int32).clamp(min=1), 0)
    elif level != "token":
        raise ValueError(f"no level of importance ratios is called {level!r}. There are: token, sequence, geometric")
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def weights(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, config: ImportanceWeightsConfig) -> Tensor:
    """min(ratio, cap), which each token's term of the policy loss is multiplied by; a constant of the loss. [B, T], 1 outside the mask."""
    return ratios(old_log_probs, rollout_log_probs, mask, config.level).clamp(max=config.cap).to(old_log_probs.dtype)


def kept(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, group: Tensor, config: RejectionConfig) -> Tensor:
    """What rejection leaves of the mask.

    A unit (token, sequence, group) goes as a whole where any of its ratios lies outside of [low, high], or is no number.

    Args:
        old_log_probs, rollout_log_probs, mask: [B, T] as in `ratios`. Of a group all samples must be there.
        group: [B] int64; samples of one prompt share a number.

    Returns:
        [B, T] bool.
    """
    found = ratios(old_log_probs, rollout_log_probs, mask, config.level)
    # Not `(found < low) | (found > high)`: a NaN is outside.
    outside = mask & ~((found >= config.low) & (found <= config.high))
    if config.unit == "token":
        return mask & ~outside
    rejected = outside.any(dim=1)
    if config.unit == "group":
        rejected = torch.isin(group, group[rejected])
    return mask & ~rejected[:, None]


def correction_statistics(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, group: Tensor, config: OffPolicyConfig | None
) -> Statistics:
    """How much the correction does, over response tokens; arguments as in `kept`.

    Returns:
        `policy/off_policy_clipped_fraction`: tokens whose ratio lies above the cap; `policy/off_policy_rejected_fraction`: tokens that
        rejection takes out. Both are 0 where the recipe corrects nothing.
    """
    tokens, clipped, rejected = int(mask.count_nonzero()), 0, 0
    if config is not None and config.weights is not None:
        found = ratios(old_log_probs, rollout_log_probs, mask, config.weights.level)
        clipped = int((mask & (found > config.weights.cap)).count_nonzero())
    if config is not None and config.rejection is not None:
        rejected = tokens - int(kept(old_log_probs, rollout_log_probs, mask, group, config.rejection).count_nonzero())
    statistics = Statistics()
    statistics.add("policy/off_policy_clipped_fraction", Mean(clipped, tokens))
    statistics.add("policy/off_policy_rejected_fraction", Mean(rejected, tokens))
    return statistics

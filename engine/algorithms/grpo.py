"""Group Relative Policy Optimization's advantage, and its variants without or with another scale.

Shao et al. 2024, arXiv:2402.03300, section 4.1.2; scale `batch`: Liu et al. 2025, arXiv:2508.08221; scale `minibatch`: Magistral,
arXiv:2506.10910, section 2.1; scale `none`: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783.
Left out: the KL term in the loss, and the length normalisation, which is `aggregation`'s business. Magistral also subtracts the mini-batch's
mean of the centred rewards, which is 0 for whole groups.
"""

import torch
from torch import Tensor

from engine.algorithms.groups import Groups, deviations
from engine.algorithms.types import AdvantageInputs, Advantages
from engine.config import GRPOAdvantageConfig

EPSILON = 1e-6


def advantages(inputs: AdvantageInputs, config: GRPOAdvantageConfig) -> Advantages:
    """Group-relative advantage: (reward - group mean) / standard deviation, the same on every response token.

    Returns:
        Advantages [B, T], 0 outside the mask; no returns. ValueError where tokens have rewards of their own.
    """
    groups = Groups.of_outcomes(inputs, config.estimator)
    mini_batch = inputs.needed("mini_batch", "scale=minibatch reads it") if config.scale == "minibatch" else None
    return Advantages.of_samples(grpo(inputs.rewards, groups, config.scale, groups.valid, mini_batch), inputs)


def grpo(rewards: Tensor, groups: Groups, scale: str, valid: Tensor, mini_batch: Tensor | None = None) -> Tensor:
    """(R_i - mu_g) / (sigma + 1e-6), standard deviations with ddof = 1.

    Args:
        rewards: [B] outcome scores.
        groups: of these rewards.
        scale: sigma is that of the rewards over the `group`, or over the valid samples of the `batch` (the step); that of the centred rewards
            over the optimizer's `minibatch`; or `none` (centred only).
        valid: [B] bool. Samples without a response token leave every statistic, and get 0.
        mini_batch: [B] int64 from 0 on, for `minibatch` alone.

    Returns:
        [B] float64; exactly 0 in a group of one and in a constant group.
    """
    if scale == "none":
        return groups.centred
    if scale == "group":
        sigma = deviations(rewards, valid, groups.index)
    elif scale == "batch":
        sigma = deviations(rewards, valid, torch.zeros_like(groups.index))
    else:
        assert scale == "minibatch", scale
        assert mini_batch is not None, "scale=minibatch without mini-batches"
        sigma = deviations(groups.centred, valid, mini_batch)
    return groups.centred / (sigma + EPSILON)

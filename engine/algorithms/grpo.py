"""Group Relative Policy Optimization's advantage, and its variants without or with another scale.

Shao et al. 2024, arXiv:2402.03300, section 4.1.2; scale `none`: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783.
Left out: the KL term in the loss, and the length normalisation, which is `aggregation`'s business.
"""

import torch
from torch import Tensor

from engine.algorithms.groups import Groups
from engine.algorithms.types import AdvantageInputs, Advantages
from engine.config import AdvantageConfig

EPSILON = 1e-6


def advantages(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Group-relative advantage: (reward - group mean) / standard deviation, the same on every response token.

    Returns:
        Advantages [B, T], 0 outside the mask; no returns. ValueError where tokens have rewards of their own.
    """
    if inputs.token_rewards is not None:
        raise ValueError(
            "algorithm.advantage.estimator=grpo knows one reward a sample, and tokens have rewards of their own; set algorithm.kl.place=loss"
        )
    values = grpo(inputs.rewards, inputs.group, config.scale, inputs.valid)
    return Advantages(torch.where(inputs.mask, values[:, None], 0))


def grpo(rewards: Tensor, group: Tensor, scale: str, valid: Tensor) -> Tensor:
    """(R_i - mu_g) / (sigma + 1e-6), standard deviations with ddof = 1.

    Args:
        rewards: [B] outcome scores, floating point.
        group: [B] int64; samples of one prompt share a number.
        scale: sigma over the `group`, over the valid samples of the `batch` (the step), or `none` (centred only).
        valid: [B] bool. Samples without a response token leave the statistics of their group and of the batch, and get 0.

    Returns:
        [B] in the type of `rewards`; exactly 0 in a group of one and in a constant group.
    """
    assert rewards.is_floating_point(), rewards.dtype
    groups = Groups.of(rewards, group, valid)
    values = torch.where(valid, rewards, 0).double()
    centred = torch.where(valid & groups.informative[groups.index], values - groups.mean[groups.index], 0)
    if scale == "group":
        squares = torch.zeros_like(groups.mean).index_add(0, groups.index, centred.square())
        scaled = centred / ((squares / (groups.size - 1).clamp(min=1)).sqrt()[groups.index] + EPSILON)
    elif scale == "batch":
        number = valid.sum()
        spread = torch.where(valid, values - values.sum() / number.clamp(min=1), 0).square().sum()
        scaled = centred / ((spread / (number - 1).clamp(min=1)).sqrt() + EPSILON)
    elif scale == "none":
        scaled = centred
    else:
        raise ValueError(f"algorithm.advantage.scale is {scale!r}; it can be group, batch or none")
    return scaled.to(rewards.dtype)

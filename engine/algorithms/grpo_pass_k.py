"""An advantage for the best sample of each group alone, which optimises the best of n answers in place of their mean.

Tang et al. 2025, arXiv:2503.19595, "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning": the leave-one-out
gradient of max-of-n, scaled as GRPO's.
"""

import torch

from engine.algorithms.groups import Groups, deviations
from engine.algorithms.grpo import EPSILON
from engine.algorithms.types import AdvantageInputs, Advantages
from engine.config import GRPOPassKAdvantageConfig


def advantages(inputs: AdvantageInputs, config: GRPOPassKAdvantageConfig) -> Advantages:
    """Best sample of each group: (its reward - the second reward) / standard deviation of the group; 0 for the others.

    (r_max - r_second) / (sigma_g + 1e-6), ddof = 1. Where two samples share the best reward, neither made a difference, and all get 0.

    Returns:
        Advantages [B, T], 0 outside the mask, in a group of one, and in a constant group. ValueError where tokens have rewards of their own.
    """
    groups = Groups.of_outcomes(inputs, config.estimator)
    valid = groups.valid
    rewards = torch.where(valid, inputs.rewards, -torch.inf).double()
    lowest = rewards.new_full(groups.size.shape, -torch.inf)
    best = rewards == lowest.scatter_reduce(0, groups.index, rewards, "amax")[groups.index]
    second = lowest.scatter_reduce(0, groups.index, rewards.where(~best, -torch.inf), "amax")[groups.index]
    alone = torch.zeros_like(groups.size).index_add(0, groups.index, best.double())[groups.index] == 1
    ahead = torch.where(valid & best & alone & groups.informative[groups.index], rewards - second, 0)
    return Advantages.of_samples(ahead / (deviations(inputs.rewards, valid, groups.index) + EPSILON), inputs)

"""On-policy RL with the optimal reward baseline: long answers count for more in the mean that is subtracted.

Hao et al. 2025, arXiv:2505.23585, section 3: the baseline of least gradient variance, where a sample's squared gradient norm grows with its length.
"""

import torch

from engine.algorithms.groups import Groups
from engine.algorithms.types import AdvantageInputs, Advantages
from engine.config import OPOAdvantageConfig


def advantages(inputs: AdvantageInputs, config: OPOAdvantageConfig) -> Advantages:
    """Reward minus the length-weighted mean reward of its group.

    R_i - b_g, b_g = sum(l R) / sum(l) over the group, l the number of response tokens.

    Returns:
        Advantages [B, T], 0 outside the mask, in a group of one, and in a constant group. ValueError where tokens have rewards of their own.
    """
    groups = Groups.of_outcomes(inputs, config.estimator)
    length, zeros = inputs.mask.sum(dim=1, dtype=torch.int32).double(), torch.zeros_like(groups.size)
    # Of the centred rewards, which moves the baseline by the mean, and the mean out of both terms: a constant group is then exactly 0.
    weighted = zeros.index_add(0, groups.index, length * groups.centred)
    baseline = weighted / zeros.index_add(0, groups.index, length).clamp(min=1)
    return Advantages.of_samples(groups.centred - baseline[groups.index], inputs)

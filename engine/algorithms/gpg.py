"""Group Policy Gradient's advantage.

Chu et al. 2025, arXiv:2504.02546, section 3. Its loss is `reinforce`. The factor alpha counts samples with a reward; the paper's counts samples in
groups with a signal.
"""

import torch

from engine.algorithms.groups import Groups
from engine.algorithms.types import AdvantageInputs, Advantages
from engine.config import GPGAdvantageConfig


def advantages(inputs: AdvantageInputs, config: GPGAdvantageConfig) -> Advantages:
    """Reward minus the mean of its group, times how many samples of the step there are for each with a reward.

    alpha (R_i - mu_g), alpha = samples / max(1, samples with R != 0), both over the samples with a response token.

    Returns:
        Advantages [B, T], 0 outside the mask, in a group of one, and in a constant group. ValueError where tokens have rewards of their own.
    """
    groups = Groups.of_outcomes(inputs, config.estimator)
    valid = groups.valid
    rewarded = (torch.where(valid, inputs.rewards, 0) != 0).sum().clamp(min=1)
    return Advantages.of_samples(valid.sum() / rewarded * groups.centred, inputs)

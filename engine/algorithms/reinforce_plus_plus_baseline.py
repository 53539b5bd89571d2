"""REINFORCE++ with the group's mean as a baseline, for several samples a prompt.

Hu et al. 2025, arXiv:2501.03262, section 3 (REINFORCE++-baseline).
"""

import torch

from engine.algorithms.groups import Groups
from engine.algorithms.returns import whiten
from engine.algorithms.types import AdvantageInputs, Advantages
from engine.config import ReinforcePlusPlusBaselineAdvantageConfig


def advantages(inputs: AdvantageInputs, config: ReinforcePlusPlusBaselineAdvantageConfig) -> Advantages:
    """Reward minus the mean of its group, on every response token, whitened over the response tokens of the step.

    (R_i - mu_g - mean) / sqrt(variance + 1e-8). Tokens of a group of one and of a constant group count in mean and variance as the zeros that
    they are, and get exactly 0: whitening alone would teach them to be longer or shorter.

    Returns:
        Advantages [B, T], 0 outside the mask. ValueError where tokens have rewards of their own.
    """
    groups = Groups.of_outcomes(inputs, config.estimator)
    whitened = whiten(groups.centred[:, None].expand(inputs.mask.shape), inputs.mask)
    return Advantages(torch.where(groups.informative[groups.index, None], whitened, 0).to(inputs.rewards.dtype))

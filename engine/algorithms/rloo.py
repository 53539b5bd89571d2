"""REINFORCE Leave-One-Out: the other samples of the prompt are the baseline.

Ahmadian et al. 2024, arXiv:2402.14740, section 3.2 (Kool, van Hoof & Welling 2019). Left out: the KL term that the paper puts into the
reward; here it can stand in the loss.
"""

from engine.algorithms.groups import Groups
from engine.algorithms.types import AdvantageInputs, Advantages
from engine.config import RLOOAdvantageConfig


def advantages(inputs: AdvantageInputs, config: RLOOAdvantageConfig) -> Advantages:
    """Each reward minus the mean reward of the other samples of its group.

    R_i - (sum of the others) / (n - 1) = n / (n - 1) (R_i - mu_g), n the samples of the group with a response token.

    Returns:
        Advantages [B, T], 0 outside the mask, in a group of one, and in a constant group. ValueError where tokens have rewards of their own.
    """
    groups = Groups.of_outcomes(inputs, config.estimator)
    size = groups.size[groups.index]
    return Advantages.of_samples(size / (size - 1).clamp(min=1) * groups.centred, inputs)

"""The policy gradient as it is.

Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning", Machine Learning 8, section 4; Group
Policy Gradient, Chu et al. 2025, arXiv:2504.02546, is the same with an advantage of its own (`gpg`).
"""

import torch

from engine.algorithms.types import LossInputs, LossTerms
from engine.config import GPGLossConfig, ReinforceLossConfig


def loss(inputs: LossInputs, config: ReinforceLossConfig | GPGLossConfig) -> LossTerms:
    """Advantage x log-prob, without ratio and clip.

    -A lp. Nothing is cut off, and nothing corrects for a policy that has moved since it drew the samples: for updates_per_step=1.

    Returns:
        Terms [B, T], 0 outside the mask.
    """
    advantages, log_probs = (torch.where(inputs.mask, tensor, 0) for tensor in (inputs.advantages, inputs.log_probs))
    return LossTerms(per_token=-advantages * log_probs)

"""ReMax: the greedy answer to the same prompt is the baseline.

Li et al. 2023, arXiv:2310.10505, algorithm 2. One greedy request a prompt goes out in the same rollout; its answer is scored and not trained on.
"""

import torch

from engine.algorithms.returns import rewards_to_go
from engine.algorithms.types import AdvantageInputs, Advantages
from engine.config import ReMaxAdvantageConfig


def advantages(inputs: AdvantageInputs, config: ReMaxAdvantageConfig) -> Advantages:
    """Reward to go of each response token minus the reward of the greedy answer to the prompt.

    Returns:
        Advantages [B, T] in the type of the rewards, 0 outside the mask. ValueError without greedy_rewards.
    """
    greedy = inputs.needed("greedy_rewards", "algorithm.advantage.estimator=remax subtracts the reward of the greedy answer to each prompt")
    values = (rewards_to_go(inputs) - greedy[:, None]).to(inputs.rewards.dtype)
    return Advantages(torch.where(inputs.mask, values, 0))

"""ReMax: the greedy answer to the same prompt is the baseline.

Li et al. 2023, arXiv:2310.10505, algorithm 2. One greedy request a prompt goes out in the same rollout; its answer is scored and not trained on.
"""

import torch

from engine.algorithms.returns import compact, rewards_by_token, spread, sums_to_come
from engine.algorithms.types import AdvantageInputs, Advantages
from engine.config import ReMaxAdvantageConfig


def advantages(inputs: AdvantageInputs, config: ReMaxAdvantageConfig) -> Advantages:
    """Reward to go of each response token minus the reward of the greedy answer to the prompt.

    Returns:
        Advantages [B, T] in the type of the rewards, 0 outside the mask. ValueError without greedy_rewards.
    """
    greedy = inputs.needed("greedy_rewards", "algorithm.advantage.estimator=remax subtracts the reward of the greedy answer to each prompt")
    to_go = spread(sums_to_come(compact(rewards_by_token(inputs), inputs.mask), 1.0), inputs.mask)
    return Advantages(torch.where(inputs.mask, to_go - greedy[:, None], 0).to(inputs.rewards.dtype))

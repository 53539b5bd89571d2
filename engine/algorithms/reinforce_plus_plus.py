"""REINFORCE with PPO's tricks and no critic: the reward to go, whitened over the step.

Hu et al. 2025, arXiv:2501.03262, section 3. The KL penalty by token is `algorithm.kl.place=reward`.
"""

from engine.algorithms.returns import Together, rewards_by_token, sums_to_come, whiten
from engine.algorithms.types import AdvantageInputs, Advantages
from engine.config import ReinforcePlusPlusAdvantageConfig


def advantages(inputs: AdvantageInputs, config: ReinforcePlusPlusAdvantageConfig) -> Advantages:
    """Discounted reward to go of each response token, whitened over the response tokens of the step.

    G_t = r_t + gamma G_next, the outcome on the last response token; then (G - mean) / sqrt(variance + 1e-8).

    Returns:
        Advantages [B, T] in the type of the rewards, 0 outside the mask.
    """
    together = Together.of(inputs.mask)
    to_go = together.spread(sums_to_come(together.compact(rewards_by_token(inputs)), config.gamma))
    return Advantages(whiten(to_go, inputs.mask).to(inputs.rewards.dtype))

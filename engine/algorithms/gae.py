"""Generalised advantage estimation: how much better a token was than a critic expected.

Schulman et al. 2016, arXiv:1506.02438, equations 11 to 16; whitening as PPO's implementations do it (Huang et al. 2022, "The 37
Implementation Details of Proximal Policy Optimization"). A response ends its episode: after its last token nothing is worth anything.
"""

import torch
from torch import Tensor

from engine.algorithms.returns import Together, rewards_by_token, sums_to_come, whiten
from engine.algorithms.types import AdvantageInputs, Advantages
from engine.config import GAEAdvantageConfig


def advantages(inputs: AdvantageInputs, config: GAEAdvantageConfig) -> Advantages:
    """Generalised advantage estimation from a critic's values, whitened over the step.

    The outcome reward stands on the last response token of its sample, beside the rewards by token.

    Returns:
        Advantages and returns [B, T] in the type of the values, 0 outside the mask; returns are advantages before whitening plus values.
        ValueError without values.
    """
    given = inputs.needed("values", "algorithm.advantage.estimator=gae reads a critic's; set algorithm.critic.optimizer.learning_rate")
    values = torch.where(inputs.mask, given, 0).double()
    estimates = gae(rewards_by_token(inputs), values, inputs.mask, config.gamma, config.lam)
    whitened = whiten(estimates, inputs.mask) if config.whiten else estimates
    return Advantages(whitened.to(given.dtype), (estimates + values).to(given.dtype))


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """A_t = delta_t + gamma lam A_next, delta_t = r_t + gamma V_next - V_t; *next* is the next response token of the row, if there is one.

    Args:
        rewards: [B, T] by token. Whatever stands outside the mask, here and in `values`, has no effect.
        values: [B, T] of the state before each token.
        mask: [B, T] bool. Tokens outside it (prompt, padding, what a tool answered) pass no time and hand both sums on.
        gamma: discount by response token.
        lam: 0 gives the one-step error, 1 the discounted reward to go minus the value.

    Returns:
        [B, T], 0 outside the mask.
    """
    assert rewards.shape == values.shape == mask.shape, (rewards.shape, values.shape, mask.shape)
    together = Together.of(mask)
    earned, value = together.compact(rewards), together.compact(values)
    next_value = torch.nn.functional.pad(value[:, 1:], (0, min(1, value.shape[1])))
    return together.spread(sums_to_come(earned + gamma * next_value - value, gamma * lam))

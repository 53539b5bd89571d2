"""Generalised advantage estimation: how much better a token was than a critic expected.

Schulman et al. 2016, arXiv:1506.02438, equations 11 to 16; whitening as PPO's implementations do it (Huang et al. 2022, "The 37
Implementation Details of Proximal Policy Optimization"). A response ends its episode: after its last token nothing is worth anything.
"""

import torch
from torch import Tensor

from engine.algorithms.types import AdvantageInputs, Advantages
from engine.config import AdvantageConfig

EPSILON = 1e-8


def advantages(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Generalised advantage estimation from a critic's values, whitened over the step.

    The outcome reward stands on the last response token of its sample, beside the rewards by token.

    Returns:
        Advantages and returns [B, T] in the type of the values, 0 outside the mask; returns are advantages before whitening plus values.
        ValueError without values.
    """
    if inputs.values is None:
        raise ValueError("algorithm.advantage.estimator=gae reads a critic's values; set algorithm.critic.optimizer.learning_rate")
    values = torch.where(inputs.mask, inputs.values, 0).double()
    estimates = gae(_rewards_by_token(inputs), values, inputs.mask, config.gamma, config.lam)
    whitened = whiten(estimates, inputs.mask) if config.whiten else estimates
    return Advantages(whitened.to(inputs.values.dtype), (estimates + values).to(inputs.values.dtype))


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
    estimates = torch.zeros_like(values)
    next_value, next_estimate = values.new_zeros(len(values)), values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        now = mask[:, t]
        error = rewards[:, t] + gamma * next_value - values[:, t]
        next_estimate = torch.where(now, error + gamma * lam * next_estimate, next_estimate)
        next_value = torch.where(now, values[:, t], next_value)
        estimates[:, t] = torch.where(now, next_estimate, 0)
    return estimates


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens of the mask, the variance unbiased; 0 for a single token, and outside the mask."""
    number = mask.sum()
    centred = torch.where(mask, values - torch.where(mask, values, 0).sum() / number.clamp(min=1), 0)
    return centred * (centred.square().sum() / (number - 1).clamp(min=1) + EPSILON).rsqrt()


def _rewards_by_token(inputs: AdvantageInputs) -> Tensor:
    to_come = inputs.mask.flip(1).cumsum(1).flip(1)  # response tokens from here on, this one included
    rewards = torch.where(inputs.mask & (to_come == 1), inputs.rewards[:, None], 0).double()
    return rewards if inputs.token_rewards is None else rewards + inputs.token_rewards

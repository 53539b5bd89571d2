"""Rewards by token, and sums of them from each token on: what estimators with an advantage of its own for each token are built from.

A row's response tokens are moved together first, so that nothing between them (what a tool answered, the next user turn) is seen.
"""

import torch
from torch import Tensor

from engine.algorithms.types import AdvantageInputs

EPSILON = 1e-8


def rewards_by_token(inputs: AdvantageInputs) -> Tensor:
    """r [B, T] in float64: the outcome on the last response token of its sample, beside the rewards by token. 0 outside the mask."""
    to_come = inputs.mask.flip(1).cumsum(1).flip(1)  # response tokens from here on, this one included
    rewards = torch.where(inputs.mask & (to_come == 1), inputs.rewards[:, None], 0).double()
    return rewards if inputs.token_rewards is None else torch.where(inputs.mask, rewards + inputs.token_rewards, 0)


def compact(values: Tensor, mask: Tensor) -> Tensor:
    """[B, L] from [B, T]: the values on each row's response tokens, in order from column 0 on, then zeros; L is the longest response."""
    return torch.zeros_like(values[:, : _longest(mask)]).masked_scatter(_filled(mask), values[mask])


def spread(compacted: Tensor, mask: Tensor) -> Tensor:
    """The inverse of `compact`: [B, T] from [B, L], 0 outside the mask."""
    return torch.zeros(mask.shape, dtype=compacted.dtype, device=compacted.device).masked_scatter(mask, compacted[_filled(mask)])


def sums_to_come(values: Tensor, factor: float) -> Tensor:
    """S_t = x_t + factor S_(t+1) over rows [B, L], S after the last 0: the factor 1 gives plain sums of what is still to come.

    By doubling (Hillis & Steele 1986, CACM 29): after k rounds S_t holds x_t to x_(t + 2^k - 1), each with its power of the factor. That is
    log2(L) operations on whole tensors in place of L on columns, and no division by a power that may be tiny.
    """
    sums, reach = values.clone(), 1
    while reach < sums.shape[1]:
        sums[:, :-reach] += factor**reach * sums[:, reach:]
        reach *= 2
    return sums


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens of the mask, the variance unbiased; 0 for a single token, and outside the mask."""
    number = mask.sum()
    centred = torch.where(mask, values - torch.where(mask, values, 0).sum() / number.clamp(min=1), 0)
    return centred * (centred.square().sum() / (number - 1).clamp(min=1) + EPSILON).rsqrt()


def _longest(mask: Tensor) -> int:
    return int(mask.sum(dim=1).max()) if len(mask) else 0


def _filled(mask: Tensor) -> Tensor:
    return torch.arange(_longest(mask), device=mask.device) < mask.sum(dim=1, keepdim=True)

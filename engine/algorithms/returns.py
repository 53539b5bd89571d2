"""Rewards by token, and sums of them from each token on: what estimators with an advantage of its own for each token are built from.

A row's response tokens are moved together first, so that nothing between them (what a tool answered, the next user turn) is seen.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from engine.algorithms.types import AdvantageInputs

EPSILON = 1e-8
BLOCK = 32


def rewards_by_token(inputs: AdvantageInputs) -> Tensor:
    """r [B, T] in float64: the outcome on the last response token of its sample, beside the rewards by token. 0 outside the mask."""
    mask = inputs.mask
    last = mask.shape[1] - 1 - mask.flip(1).to(torch.uint8).argmax(dim=1, keepdim=True)
    rewards = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device).scatter_(1, last, _outcomes(inputs))
    return rewards if inputs.token_rewards is None else torch.where(mask, rewards + inputs.token_rewards, 0)


def rewards_to_go(inputs: AdvantageInputs) -> Tensor:
    """Undiscounted sum of the rewards from each response token on, in float64: [B, T], or [B, 1] where tokens have none of their own.

    The outcome, which stands on the last token, is in all of them. What stands outside the mask means nothing.
    """
    if inputs.token_rewards is None:
        return _outcomes(inputs)
    return _outcomes(inputs) + torch.where(inputs.mask, inputs.token_rewards, 0).double().flip(1).cumsum(1).flip(1)


@dataclass(frozen=True, slots=True)
class Together:
    """Response tokens of rows [B, T] moved together: [B, L], in order from column 0 on, then zeros; L is the longest response."""

    column: Tensor
    """[B, T] int64: where a response token goes; L outside the mask."""
    length: int
    """L."""

    @classmethod
    def of(cls, mask: Tensor) -> Self:
        """From the mask [B, T] bool."""
        number = mask.cumsum(1, dtype=torch.int32)
        length = int(number[:, -1].max()) if number.numel() else 0
        return cls(column=(number - 1).masked_fill_(~mask, length).long(), length=length)

    def compact(self, values: Tensor) -> Tensor:
        """[B, L] from [B, T]. Whatever stands outside the mask has no effect."""
        return values.new_zeros(len(values), self.length + 1).scatter_(1, self.column, values)[:, : self.length]

    def spread(self, compacted: Tensor) -> Tensor:
        """The inverse: [B, T] from [B, L], 0 outside the mask."""
        return torch.nn.functional.pad(compacted, (0, 1)).gather(1, self.column)


def sums_to_come(values: Tensor, factor: float) -> Tensor:
    """S_t = x_t + factor S_(t+1) over rows [B, L], S after the last 0.

    By blocks of 32 columns: within each, a product with the triangular matrix of the factor's powers; then each takes over, from the last to the
    first, what the next one begins with. That is L / 32 short operations in place of L, and no division by a power that may be tiny.
    """
    rows, length = values.shape
    column = torch.arange(BLOCK, device=values.device)
    distance = column[:, None] - column
    powers = torch.where(distance >= 0, factor ** distance.clamp(min=0).to(values.dtype), 0)
    blocks = -(-length // BLOCK)
    sums = torch.nn.functional.pad(values, (0, -length % BLOCK)).view(rows, blocks, BLOCK) @ powers
    for block in reversed(range(blocks - 1)):
        sums[:, block] += sums[:, block + 1, :1] * factor ** (BLOCK - column).to(values.dtype)
    return sums.flatten(1)[:, :length]


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens of the mask, the variance unbiased; 0 for a single token, and outside the mask."""
    number = mask.count_nonzero()
    centred = torch.where(mask, values - torch.where(mask, values, 0).sum() / number.clamp(min=1), 0)
    return centred * (centred.square().sum() / (number - 1).clamp(min=1) + EPSILON).rsqrt()


def _outcomes(inputs: AdvantageInputs) -> Tensor:
    return torch.where(inputs.valid, inputs.rewards, 0).double()[:, None]

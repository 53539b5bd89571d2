"""A padded micro-batch without its padding: the real tokens of all samples stand in one row."""

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the N real tokens of a padded [B, T] stand, sample after sample. Rows are padded on the right."""

    place: torch.Tensor
    """[N] int64: of each token in the flattened [B * T]."""
    position: torch.Tensor
    """[N] int64: of each token in its sample, from 0."""
    lengths: list[int]
    """Tokens of each of the B samples."""
    starts: torch.Tensor
    """[B + 1] int32: the first token of each sample, and N."""

    @classmethod
    def of(cls, attention_mask: torch.Tensor) -> Self:
        """Of a mask [B, T], B and T at least 1.

        A row without any token keeps one: sharded forwards are collectives, and a rank that has nothing to do takes part with that.
        """
        mask = attention_mask.bool().clone()
        mask[:, 0] = True
        lengths = mask.sum(dim=1)
        place = mask.flatten().nonzero().squeeze(1)
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        return cls(place=place, position=place % mask.shape[1], lengths=lengths.tolist(), starts=starts)

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] to [N, ...]."""
        return padded.flatten(0, 1)[self.place]

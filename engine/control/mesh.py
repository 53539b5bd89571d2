"""Which part of the data each rank of a group works on."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Mesh:
    """`part[rank]` is the data-parallel part that a rank is given; of the ranks that share a part one speaks for it."""

    part: tuple[int, ...]
    speaks: tuple[bool, ...]

    @classmethod
    def grouped(cls, ranks: int, size: int = 1) -> Self:
        """Each `size` consecutive ranks share a part, and the first of them speaks: tensor parallelism. ValueError where that leaves a rest."""
        if ranks % size:
            raise ValueError(f"{ranks} ranks cannot be divided into groups of {size}; choose a divisor of {ranks}")
        return cls(part=tuple(rank // size for rank in range(ranks)), speaks=tuple(rank % size == 0 for rank in range(ranks)))

    @property
    def parts(self) -> int:
        """Data-parallel size."""
        return max(self.part) + 1

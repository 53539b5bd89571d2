"""Where arriving slices go: from boxes of checkpoint tensors to boxes of an engine's parameters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from engine.reshard.layout import Box, indices, intersection, relative, sizes, volume
from engine.reshard.plan import Piece
from engine.reshard.proof import Proof
from engine.reshard.recording import Copy, Wanted


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a piece, and the box of a parameter in which it lands."""

    parameter: str
    target: Box
    source: Box
    """Of the piece's values."""
    whole: bool
    """The part is all of the piece."""

    @property
    def elements(self) -> int:
        """How many land."""
        return volume(self.target)

    def put(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Copies the values of the piece; a cast to the parameter's type is part of it."""
        view = parameter[indices(self.target)]
        view.copy_(values[indices(self.source)].reshape(view.shape))

    def seen(self, parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The piece, as it lies in the parameter."""
        return parameter[indices(self.target)].view(sizes(piece.box))


class Landings:
    """Of one engine on one rank."""

    def __init__(self, wanted: Wanted) -> None:
        self._copies: dict[str, list[Copy]] = {}
        self.elements: dict[str, int] = {}
        """By parameter: how many of it are loaded."""
        for copy in wanted.copies:
            self._copies.setdefault(copy.tensor, []).append(copy)
            self.elements[copy.parameter] = self.elements.get(copy.parameter, 0) + volume(copy.target)
        self._known: dict[Piece, list[Place]] = {}

    def places(self, piece: Piece) -> list[Place]:
        """All places in which a piece lands."""
        if piece not in self._known:
            copies = self._copies.get(piece.tensor, [])
            self._known[piece] = [_place(piece, copy, part) for copy in copies if (part := intersection(piece.box, copy.source))]
        return self._known[piece]

    def fill(self, parameters: Mapping[str, torch.Tensor], arrivals: Iterable[tuple[Piece, torch.Tensor]], proof: Proof) -> None:
        """Puts every slice straight into the parameters that an engine computes with, and then shows the proof where it lies."""
        seen = []
        for piece, values in arrivals:
            for place in self.places(piece):
                place.put(parameters[place.parameter].data, values)
                seen.append((piece, place))
        for piece, place in seen:
            if place.whole:
                proof.landed(piece, place.seen(parameters[place.parameter].data, piece))


def _place(piece: Piece, copy: Copy, part: Box) -> Place:
    # Dimensions of length 1 may have come or gone between the tensor and the parameter.
    long = iter([moved for moved, size in zip(relative(part, copy.source), sizes(copy.source), strict=True) if size > 1])
    target = tuple((low, high) if high - low == 1 else _moved(next(long), low) for low, high in copy.target)
    return Place(copy.parameter, target, relative(part, piece.box), part == piece.box)


def _moved(bounds: tuple[int, int], by: int) -> tuple[int, int]:
    return bounds[0] + by, bounds[1] + by

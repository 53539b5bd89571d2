"""A trainer's shards as slices of the checkpoint's tensors, in the memory where they lie."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from engine.reshard.checkpoint import Checkpoint
from engine.reshard.layout import Box, Tensor, cut, cuts, indices, intersection, relative, sizes, through
from engine.training.shards import local

Slices = Mapping[str, Sequence[tuple[Box, torch.Tensor]]]
"""By checkpoint name: boxes that do not overlap, each with a view of its elements, shaped as the box."""


def held_slices(parameters: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> Slices:
    """What this rank has of each checkpoint tensor. `parameters` are the trainer's by name: DTensors, or whole tensors. No copy, no collective.

    Raises ValueError where a parameter is missing, or of another shape than its model's configuration says; it is named.
    """
    found: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for name, part in checkpoint.parts.items():
        parameter, expected = parameters.get(part.parameter), checkpoint.parameters[part.parameter]
        if parameter is None:
            raise ValueError(f"{name}: the trainer has no parameter {part.parameter}; its model is not the one that its configuration describes")
        if tuple(parameter.shape) != expected.shape:
            raise ValueError(f"{name}: the trainer's {part.parameter} has shape {tuple(parameter.shape)}, its configuration says {expected.shape}")
        held = held_box(parameter)
        box, own = through(part, held, checkpoint.tensors[name]), intersection(part.box, held)
        if box is None or own is None:
            continue
        found[name] = [(box, local(parameter)[indices(relative(own, held))].view(sizes(box)))]
    if excess := sorted(parameters.keys() - {part.parameter for part in checkpoint.parts.values()}):
        raise ValueError(f"{', '.join(excess[:5])}: the trainer has parameters of which the checkpoint holds nothing")
    return found


def held_box(parameter: torch.Tensor) -> Box:
    """The box of a parameter that lies on this rank."""
    whole = Tensor(tuple(parameter.shape), "").whole
    if not isinstance(parameter, DTensor):
        return whole
    mesh: Any = parameter.device_mesh
    return cut(whole, cuts(parameter.placements, tuple(mesh.shape), mesh.get_coordinate()))


def boxes_of(slices: Slices) -> dict[str, tuple[Box, ...]]:
    """The boxes alone."""
    return {name: tuple(box for box, _ in held) for name, held in slices.items()}


def taken(held: Iterable[tuple[Box, torch.Tensor]], box: Box) -> torch.Tensor:
    """The view of `box`, which lies inside one of `held`. KeyError where it does not."""
    for outer, view in held:
        if intersection(outer, box) == box:
            return view[indices(relative(box, outer))]
    raise KeyError(box)

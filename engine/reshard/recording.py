"""Which slice of which checkpoint tensor lands where: the model's own weight loaders are run on tensors without storage, and watched.

A copy between views says all there is to know by its offsets and strides, so nothing is computed and the size of a model does not matter.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.reshard.layout import Box, Part, without

KEEP_ELEMENTS = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}
"""Operations that make a new, contiguous tensor of the same elements in the same order."""
WRITES = {torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}
"""Operations of loaders that change a tensor: a copy, or a constant."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One slice on its way: a box of a checkpoint tensor into a box of a parameter."""

    tensor: str
    source: Box
    parameter: str
    target: Box


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which slices of the checkpoint's tensors an engine takes on one rank, and where they land."""

    copies: Sequence[Copy]
    types: Mapping[str, str]
    """By checkpoint name: the type in which it is wanted, and travels."""

    def boxes(self) -> dict[str, tuple[Box, ...]]:
        """By checkpoint name: what the rank needs. What lands in two places does so once."""
        found: dict[str, list[Box]] = {}
        for copy in self.copies:
            found.setdefault(copy.tensor, []).extend(without([copy.source], found.get(copy.tensor, [])))
        return {name: tuple(boxes) for name, boxes in found.items() if boxes}


@dataclass(frozen=True, slots=True)
class _Origin:
    """A storage whose elements, in order, are those of a box of a named tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the tensor that the storage was made for."""
    box: Box
    """What it holds of the named tensor."""


def view_box(view: torch.Tensor, shape: tuple[int, ...]) -> Box | None:
    """The box that `view` sees of a contiguous tensor of `shape` at the start of its storage; None where that is no box."""
    if view.numel() == 0:
        return tuple((0, 0) for _ in shape)
    strides = _strides(shape)
    last = view.storage_offset() + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    box = tuple((a, b + 1) for a, b in zip(_index(int(view.storage_offset()), strides), _index(int(last), strides), strict=True))
    if any(start >= stop for start, stop in box):
        return None
    sizes = [stop - start for start, stop in box]
    return box if _runs(sizes, strides) == _runs(list(view.shape), list(view.stride())) else None


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, notes every copy out of `sources` and into `parameters`, both contiguous.

    Raises ValueError, naming the tensor, when something is done to a source whose outcome is not one of its slices, or a slice is no box.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[Copy] = []
        self.filled: dict[str, int] = {}
        """Elements by parameter that a loader set to a constant: padding."""
        self._kept: dict[int, Any] = {}  # storages are told apart by address, which must not be used again
        self._origins = {self._key(tensor): _Origin(name, tuple(tensor.shape), _whole(tensor)) for name, tensor in sources.items()}
        self._parameters = {self._key(tensor): (name, tuple(tensor.shape)) for name, tensor in parameters.items()}
        self._strange: dict[int, tuple[str, str]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation passes here."""
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        # A parameter with values keeps them.
        writes = operation in WRITES and not tensors[0].is_meta and self._key(tensors[0]) in self._parameters
        result = tensors[0] if writes else operation(*args, **(kwargs or {}))
        if operation is torch.ops.aten.copy_.default:
            self._copied(*tensors[:2])
        elif operation in WRITES:
            if found := self._parameters.get(self._key(tensors[0])):
                self.filled[found[0]] = self.filled.get(found[0], 0) + tensors[0].numel()
        elif isinstance(result, torch.Tensor) and self._key(result) not in self._origins:
            self._made(operation, tensors, result)
        return result

    def origin(self, tensor: torch.Tensor) -> Part:
        """Which box of which source `tensor` is. ValueError where it was computed."""
        key = self._key(tensor)
        if key not in self._origins:
            name, operation = self._strange.get(key, ("a tensor", "of unknown origin"))
            raise ValueError(f"{name}: the checkpoint's form of it is computed ({operation}), and not a slice")
        return Part(self._origins[key].name, self._source(tensor, self._origins[key]))

    def _made(self, operation: Any, tensors: list[torch.Tensor], result: torch.Tensor) -> None:
        """A new tensor: the same elements as before, or something of which only the operation is remembered, in case it is copied."""
        for tensor in tensors:
            if (origin := self._origins.get(self._key(tensor))) and operation in KEEP_ELEMENTS and result.is_contiguous():
                self._origins[self._key(result)] = _Origin(origin.name, tuple(result.shape), self._source(tensor, origin))
                return
            strange = (origin.name, str(operation)) if origin else self._strange.get(self._key(tensor))
            if strange:
                self._strange.setdefault(self._key(result), strange)

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if strange := self._strange.get(self._key(source)):
            raise ValueError(f"{strange[0]}: its loader computes with it ({strange[1]}), so what it loads is not a slice of the checkpoint")
        origin, found = self._origins.get(self._key(source)), self._parameters.get(self._key(target))
        if origin is None or target.numel() == 0:
            return
        if target.numel() != source.numel() or _longer(target.shape) != _longer(source.shape):
            raise ValueError(f"{origin.name}: its loader copies {tuple(source.shape)} into {tuple(target.shape)}; a slice must keep its shape")
        box = self._source(source, origin)
        if found is None:
            self._strange[self._key(target)] = origin.name, "a copy put aside"
            return
        landed = view_box(target, found[1])
        if landed is None:
            raise ValueError(f"{origin.name}: what its loader writes of {found[0]} is not a box")
        self.copies.append(Copy(origin.name, box, found[0], landed))

    def _source(self, view: torch.Tensor, origin: _Origin) -> Box:
        box = view_box(view, origin.shape)
        if box is None or (long := _inside(origin, box)) is None:
            raise ValueError(f"{origin.name}: its loader takes a slice that is not a box (shape {tuple(view.shape)}, strides {view.stride()})")
        return long

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._kept.setdefault(storage._cdata, storage)
        return int(storage._cdata)


def _inside(origin: _Origin, box: Box) -> Box | None:
    """A box of the storage's tensor as a box of the named one: dimensions of length 1 may have come or gone."""
    if _longer(origin.shape) != _longer([stop - start for start, stop in origin.box]):
        return None
    long = iter([(start, stop) for (start, stop), size in zip(box, origin.shape, strict=True) if size != 1])
    moved: list[tuple[int, int]] = []
    for start, stop in origin.box:
        low, high = (0, 1) if stop - start == 1 else next(long)
        moved.append((start + low, start + high))
    return tuple(moved)


def _whole(tensor: torch.Tensor) -> Box:
    return tuple((0, size) for size in tensor.shape)


def _longer(sizes: Any) -> list[int]:
    return [size for size in sizes if size != 1]


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]


def _index(offset: int, strides: list[int]) -> Iterator[int]:
    for stride in strides:
        yield offset // stride
        offset %= stride


def _runs(sizes: list[int], strides: list[int]) -> list[tuple[int, int]]:
    """Sizes and strides with neighbours put together where they are one run: equal for equal sets of elements in equal order."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == stride * size:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs

"""Batch: what travels between operators. Rows are samples; every column has one entry for each row."""

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tensors [B, ...], lists of B objects, and meta that holds for all rows. Every method returns a new batch.

    Consecutive rows (`chunk`, a slice) share the memory of the batch that they come from: columns are never written to, only replaced. A batch is
    pickled without the memory that its rows do not cover, and without a copy where the pickler takes buffers out of band, as Ray does.

    A tensor of two or more dimensions is a *token tensor* [B, T, ...]: position t belongs to token t, rows are padded on the right with
    zeros (False), and all token tensors of a batch share T.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    objects: Mapping[str, list[Any]] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scalars = [key for key, tensor in self.tensors.items() if tensor.dim() == 0]
        if scalars:
            raise ValueError(f"batch tensors need a first dimension of rows; scalars go into meta: {', '.join(scalars)}")
        twice = [key for kind in (self.objects, self.meta) for key in kind if key in self.tensors]
        twice += [key for key in self.meta if key in self.objects]
        if twice:
            raise ValueError(f"batch keys stand for one column each, but these occur twice: {', '.join(twice)}")
        _equal("rows", {key: len(column) for column_kind in (self.tensors, self.objects) for key, column in column_kind.items()})
        _equal("tokens (dimension 1)", {key: tensor.shape[1] for key, tensor in self.tensors.items() if tensor.dim() > 1})

    def __len__(self) -> int:
        """Rows B; 0 for a batch without columns."""
        for columns in (self.tensors, self.objects):
            for column in columns.values():
                return len(column)
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; objects and meta are not counted."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def width(self) -> int | None:
        """T of the token tensors; None where there are none."""
        return next((tensor.shape[1] for tensor in self.tensors.values() if tensor.dim() > 1), None)

    def select(self, keys: Sequence[str]) -> Self:
        """Only these tensors and objects, with all meta. KeyError names the ones that are missing."""
        missing = [key for key in keys if key not in self.tensors and key not in self.objects]
        if missing:
            raise KeyError(f"batch has no {', '.join(missing)}; it has {', '.join([*self.tensors, *self.objects])}")
        tensors = {key: self.tensors[key] for key in keys if key in self.tensors}
        return self._of(tensors, {key: self.objects[key] for key in keys if key in self.objects})

    def with_tensors(self, **tensors: Tensor) -> Self:
        """The same batch with these tensors added, or put in place of those of the same name."""
        return replace(self, tensors={**self.tensors, **tensors})

    def rows(self, index: Tensor | slice) -> Self:
        """The rows that `index` names: positions [N], a bool mask [B], or a slice. A slice without step is a view, everything else is copied."""
        if isinstance(index, slice):
            start, end, step = index.indices(len(self))
            if step == 1:
                tensors = {key: tensor[start:end] for key, tensor in self.tensors.items()}
                return self._of(tensors, {key: values[start:end] for key, values in self.objects.items()})
            index = torch.arange(start, end, step)
        if index.dtype == torch.bool and index.shape != (len(self),):
            raise IndexError(f"a mask of shape {list(index.shape)} does not fit a batch of {len(self)} rows")
        positions = index.nonzero().squeeze(1) if index.dtype == torch.bool else index
        if len(positions) and positions.min() < 0:  # counted from the end, which index_select does not know
            positions = torch.arange(len(self), device=positions.device)[positions]
        return self._of(
            {key: tensor.index_select(0, positions.to(tensor.device)) for key, tensor in self.tensors.items()},
            {key: _pick(values, positions.cpu().numpy()) for key, values in self.objects.items()},
        )

    def reorder(self, order: Tensor | Sequence[int]) -> Self:
        """The rows in this order, positions [B]: row i of the result is row `order[i]`. ValueError unless each row occurs exactly once."""
        positions = torch.as_tensor(order, dtype=None if len(order) else torch.int64)
        whole = positions.shape == (len(self),) and positions.dtype != torch.bool and not positions.is_floating_point()
        if not whole or not _all_of(positions.long()):
            raise ValueError(f"reorder needs each of the {len(self)} rows exactly once")
        return self.rows(positions)

    def chunk(self, n: int) -> list[Self]:
        """Always n consecutive parts, whose sizes differ by at most one, larger ones first; with fewer rows than n the last are empty."""
        if n < 1:
            raise ValueError(f"a batch is cut into at least one chunk, not {n}")
        size, larger = divmod(len(self), n)
        sizes = [size + (part < larger) for part in range(n)]
        ends = list(itertools.accumulate(sizes, initial=0))
        cut = {key: tensor.split_with_sizes(sizes) for key, tensor in self.tensors.items()}
        return [
            self._of({key: parts[part] for key, parts in cut.items()}, {key: values[start:end] for key, values in self.objects.items()})
            for part, (start, end) in enumerate(itertools.pairwise(ends))
        ]

    def repeat(self, n: int) -> Self:
        """Each row n times in succession: a, a, b, b, ..."""
        if n < 0:
            raise ValueError(f"rows are repeated 0 times or more, not {n}")
        positions = torch.arange(len(self)).repeat_interleave(n)
        return self._of(
            {key: tensor.index_select(0, positions.to(tensor.device)) for key, tensor in self.tensors.items()},
            {key: _repeated(values, n) for key, values in self.objects.items()},
        )

    def padded_to(self, tokens: int) -> Self:
        """All token tensors with T = `tokens`: wider by zeros on the right, or narrower. ValueError if that would cut off anything but zeros."""
        if tokens < 0:
            raise ValueError(f"token tensors have a width of 0 or more, not {tokens}")
        return self._of({key: _padded(key, tensor, tokens) if tensor.dim() > 1 else tensor for key, tensor in self.tensors.items()}, self.objects)

    def _of(self, tensors: Mapping[str, Tensor], objects: Mapping[str, list[Any]]) -> Self:
        """Columns that need no check, because they come from those of this batch, all cut in the same way."""
        batch = object.__new__(type(self))
        for name, value in (("tensors", tensors), ("objects", objects), ("meta", self.meta)):
            object.__setattr__(batch, name, value)
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (type(self), {key: _packed(tensor) for key, tensor in self.tensors.items()}, dict(self.objects), dict(self.meta))


def aligned(batches: Sequence[Batch]) -> list[Batch]:
    """The same batches with token tensors of one width T: parts that came different ways are padded differently."""
    widths = [batch.width for batch in batches]
    longest = max((width for width in widths if width is not None), default=0)
    return [batch if width is None or width == longest else batch.padded_to(longest) for batch, width in zip(batches, widths, strict=True)]


def join(*batches: Batch) -> Batch:
    """Columns of several batches over the same rows, side by side. ValueError if one key stands for different values."""
    return Batch(
        tensors=_merge("tensor", [batch.tensors for batch in batches]),
        objects=_merge("object", [batch.objects for batch in batches]),
        meta=_merge("meta", [batch.meta for batch in batches]),
    )


def concat(batches: Sequence[Batch]) -> Batch:
    """Rows of several batches with the same columns, in order; token tensors are padded on the right to the longest T.

    ValueError if columns, types or inner shapes differ, or if one meta key stands for different values.
    """
    if not batches:
        raise ValueError("concat needs at least one batch")
    first = batches[0]
    for number, batch in enumerate(batches):
        differing = (set(batch.tensors) ^ set(first.tensors)) | (set(batch.objects) ^ set(first.objects))
        if differing:
            raise ValueError(f"concat: batch {number} and batch 0 do not both have {', '.join(sorted(differing))}")
    return Batch(
        tensors={key: _concat_tensors(key, [batch.tensors[key] for batch in batches]) for key in first.tensors},
        objects={key: functools.reduce(operator.iconcat, (batch.objects[key] for batch in batches), []) for key in first.objects},
        meta=_merge("meta", [batch.meta for batch in batches]),
    )


def _concat_tensors(key: str, tensors: list[Tensor]) -> Tensor:
    kinds = {(tensor.dtype, tensor.dim(), tuple(tensor.shape[2:])) for tensor in tensors}
    if len(kinds) > 1:  # torch.cat would promote the types without a word
        raise ValueError(f"concat: {key} differs in type or inner shape: {', '.join(sorted(map(str, kinds)))}")
    if tensors[0].dim() == 1:
        return torch.cat(tensors)
    longest = max(tensor.shape[1] for tensor in tensors)
    if all(tensor.shape[1] == longest for tensor in tensors):
        return torch.cat(tensors)
    joined = tensors[0].new_zeros((sum(map(len, tensors)), longest, *tensors[0].shape[2:]))
    for tensor, part in zip(tensors, joined.split_with_sizes(list(map(len, tensors))), strict=True):
        part[:, : tensor.shape[1]] = tensor
    return joined


def _padded(key: str, tensor: Tensor, tokens: int) -> Tensor:
    """[B, T, ...] to [B, tokens, ...]."""
    width = tensor.shape[1]
    if tokens == width:
        return tensor
    if tokens < width:
        if tensor[:, tokens:].any():
            raise ValueError(f"batch: {key} is not all zeros beyond {tokens} of its {width} tokens; mask it first, or leave it wider")
        return tensor[:, :tokens].contiguous()
    padded = tensor.new_zeros((len(tensor), tokens, *tensor.shape[2:]))
    padded[:, :width] = tensor
    return padded


def _all_of(positions: Tensor) -> bool:
    """Whether the N positions are 0 to N - 1, in any order."""
    seen = torch.zeros(len(positions), dtype=torch.bool, device=positions.device)
    inside = not len(positions) or (bool(positions.min() >= 0) and bool(positions.max() < len(positions)))
    return inside and bool(seen.index_fill_(0, positions, True).all())


def _pick(values: list[Any], positions: np.ndarray[Any, Any]) -> list[Any]:
    picked: list[Any] = np.fromiter(values, dtype=object, count=len(values))[positions].tolist()
    return picked


def _repeated(values: list[Any], n: int) -> list[Any]:
    repeated: list[Any] = [None] * (len(values) * n)
    for start in range(n):
        repeated[start::n] = values
    return repeated


def _packed(tensor: Tensor) -> Tensor | tuple[np.ndarray[Any, Any], torch.dtype]:
    """What is pickled for a tensor: the bytes of its rows as an array, because NumPy gives its memory to the pickler without a copy, and PyTorch
    copies it, together with all rows of the tensor that this is a view of. Empty tensors and rare kinds are left to PyTorch.
    """
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not plain or not tensor.numel() or tensor.requires_grad or tensor.is_quantized or tensor.is_complex():
        return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()
    # An expanded tensor of one element passes for contiguous, and still has steps that bytes cannot have.
    even = tensor.contiguous() if tensor.stride(-1) == 1 else tensor.clone(memory_format=torch.contiguous_format)
    return even.view(torch.uint8).numpy(), tensor.dtype


def _unpacked(kind: type[Batch], packed: Mapping[str, Any], objects: Mapping[str, list[Any]], meta: Mapping[str, Any]) -> Batch:
    tensors = {}
    for key, column in packed.items():
        if isinstance(column, tuple):
            array, dtype = column
            # Memory that many processes share, like that of Ray's store, is read-only, and a tensor does not know it.
            column = torch.from_numpy(array if array.flags.writeable else array.copy()).view(dtype)
        tensors[key] = column
    return kind(tensors=tensors, objects=objects, meta=meta)


def _merge(kind: str, parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key in merged and not _same(merged[key], value):
                raise ValueError(f"batches disagree about {kind} {key!r}; rename one, or leave it out with select")
            merged.setdefault(key, value)
    return merged


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.dtype == other.dtype and torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)


def _equal(what: str, sizes: dict[str, int]) -> None:
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{key} {size}" for key, size in sizes.items())
        raise ValueError(f"batch columns differ in {what}: {listed}")

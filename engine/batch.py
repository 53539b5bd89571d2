"""Batch: what travels between operators. Rows are samples; every column has one entry for each row."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tensors [B, ...], lists of B objects, and meta that holds for all rows. Every method returns a new batch.

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

    def padded_to(self, tokens: int) -> Self:
        """Token tensors padded on the right with zeros to T = `tokens`. ValueError where they are wider."""
        if (width := self.width) is not None and width > tokens:
            raise ValueError(f"token tensors of width {width} cannot be padded to {tokens}")
        padded = {
            key: torch.cat([tensor, tensor.new_zeros((len(tensor), tokens - tensor.shape[1], *tensor.shape[2:]))], dim=1)
            if tensor.dim() > 1
            else tensor
            for key, tensor in self.tensors.items()
        }
        return replace(self, tensors=padded)

    def select(self, keys: Sequence[str]) -> Self:
        """Only these tensors and objects, with all meta. KeyError names the ones that are missing."""
        missing = [key for key in keys if key not in self.tensors and key not in self.objects]
        if missing:
            raise KeyError(f"batch has no {', '.join(missing)}; it has {', '.join([*self.tensors, *self.objects])}")
        return replace(
            self,
            tensors={key: self.tensors[key] for key in keys if key in self.tensors},
            objects={key: self.objects[key] for key in keys if key in self.objects},
        )

    def with_tensors(self, **tensors: Tensor) -> Self:
        """The same batch with these tensors added, or put in place of those of the same name."""
        return replace(self, tensors={**self.tensors, **tensors})

    def rows(self, index: Tensor | slice) -> Self:
        """The rows that `index` names: positions [N], a bool mask [B], or a slice. Always copies.

        A view would be pickled with the whole storage below it, so that every rank would be sent every row.
        """
        positions = torch.arange(len(self))[index.cpu() if isinstance(index, Tensor) else index]
        chosen = positions.tolist()
        return replace(
            self,
            tensors={key: tensor.index_select(0, positions.to(tensor.device)) for key, tensor in self.tensors.items()},
            objects={key: [values[row] for row in chosen] for key, values in self.objects.items()},
        )

    def chunk(self, n: int) -> list[Self]:
        """Always n consecutive parts, whose sizes differ by at most one, larger ones first; with fewer rows than n the last are empty."""
        if n < 1:
            raise ValueError(f"a batch is cut into at least one chunk, not {n}")
        size, larger = divmod(len(self), n)
        starts = [part * size + min(part, larger) for part in range(n + 1)]
        return [self.rows(slice(start, end)) for start, end in itertools.pairwise(starts)]

    def repeat(self, n: int) -> Self:
        """Each row n times in succession: a, a, b, b, ..."""
        return self.rows(torch.arange(len(self)).repeat_interleave(n))


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
        objects={key: [value for batch in batches for value in batch.objects[key]] for key in first.objects},
        meta=_merge("meta", [batch.meta for batch in batches]),
    )


def _concat_tensors(key: str, tensors: list[Tensor]) -> Tensor:
    kinds = {(tensor.dtype, tensor.dim(), tuple(tensor.shape[2:])) for tensor in tensors}
    if len(kinds) > 1:  # torch.cat would promote the types without a word
        raise ValueError(f"concat: {key} differs in type or inner shape: {', '.join(sorted(map(str, kinds)))}")
    if tensors[0].dim() == 1:
        return torch.cat(tensors)
    longest = max(tensor.shape[1] for tensor in tensors)
    joined = tensors[0].new_zeros((sum(map(len, tensors)), longest, *tensors[0].shape[2:]))
    row = 0
    for tensor in tensors:
        joined[row : row + len(tensor), : tensor.shape[1]] = tensor
        row += len(tensor)
    return joined


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

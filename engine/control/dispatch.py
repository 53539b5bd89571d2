"""How the arguments of a worker's method are spread over the ranks, and how the results are gathered."""

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.batch import Batch, concat
from engine.control.mesh import Mesh
from engine.metrics import Statistics, merge

Method = TypeVar("Method", bound=Callable[..., Any])

DEFAULT_MESH = "data"
"""Every rank has a part of its own."""


@dataclass(frozen=True, slots=True)
class Share:
    """The `index`-th of `of` contiguous parts of all rows, whose sizes differ by at most one, larger ones first."""

    index: int = 0
    of: int = 1

    def range(self, rows: int) -> range:
        """Row numbers of this share of `rows`."""
        size, larger = divmod(rows, self.of)
        return range(self.index * size + min(self.index, larger), (self.index + 1) * size + min(self.index + 1, larger))


EVERYTHING = Share()


class Mode:
    """One way to call a group. A mode of one's own is a subclass; an instance of it goes into `register`."""

    rowwise = False
    """Whether results with rows are parts of one whole, whose rows a next call may divide anew."""

    def ranks(self, mesh: Mesh) -> Sequence[int]:
        """Which ranks are called."""
        return range(len(mesh.part))

    def share(self, mesh: Mesh, rank: int) -> Share:
        """Which rows of an argument that has rows (`cut`) this rank is given."""
        return EVERYTHING

    def spread(self, argument: Any, mesh: Mesh, rank: int) -> Any:
        """What this rank is given of an argument that lies in the controller."""
        return cut(argument, self.share(mesh, rank))

    def speaks(self, mesh: Mesh, rank: int) -> bool:
        """Whether this rank's result is part of the whole."""
        return True

    def gather(self, results: Sequence[Any]) -> Any:
        """The whole, from the results of the ranks that speak, in order."""
        return list(results)


class _RankZero(Mode):
    rowwise = True

    def ranks(self, mesh: Mesh) -> Sequence[int]:
        return [0]

    def gather(self, results: Sequence[Any]) -> Any:
        return results[0]


class _DataParallel(Mode):
    rowwise = True

    def share(self, mesh: Mesh, rank: int) -> Share:
        return Share(mesh.part[rank], mesh.parts)

    def speaks(self, mesh: Mesh, rank: int) -> bool:
        return mesh.speaks[rank]

    def gather(self, results: Sequence[Any]) -> Any:
        first = results[0]
        if isinstance(first, Batch):
            return concat(results)
        if isinstance(first, list):
            return [item for result in results for item in result]
        raise TypeError(f"a data-parallel method must return a Batch or a list, not {type(first).__name__}; Statistics go with METRICS")


class _Metrics(_DataParallel):
    def gather(self, results: Sequence[Any]) -> Statistics:
        wrong = [type(result).__name__ for result in results if not isinstance(result, Statistics)]
        if wrong:
            raise TypeError(f"a METRICS method must return Statistics, not {wrong[0]}")
        return merge(results)


class _Each(Mode):
    def spread(self, argument: Any, mesh: Mesh, rank: int) -> Any:
        if not isinstance(argument, list):
            return argument
        if len(argument) != len(mesh.part):
            raise ValueError(f"EACH gives every rank one item of a list: {len(argument)} items cannot go to {len(mesh.part)} ranks")
        return argument[rank]


ALL = Mode()
"""Every rank gets the same arguments; results come back as a list by rank."""
RANK_ZERO = _RankZero()
"""Rank 0 alone is called, with all rows; its result is the result."""
DATA_PARALLEL = _DataParallel()
"""What has rows is cut into one contiguous part for each data-parallel part of the mesh, everything else goes to all. Results are concatenated."""
METRICS = _Metrics()
"""Spread as DATA_PARALLEL; results are Statistics, and merged."""
EACH = _Each()
"""Lists as they are: item r of a list goes to rank r, everything else to all; results come back as a list by rank."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What `register` writes on a method."""

    mode: Mode
    mesh: str
    beside: bool


def register(mode: Mode, *, mesh: str = DEFAULT_MESH, beside: bool = False) -> Callable[[Method], Method]:
    """Marks a method of a worker class as callable through its `WorkerGroup`.

    Args:
        mode: how arguments are spread and results gathered.
        mesh: over which of the meshes that the class names in `meshes`; `data` gives every rank a part of its own.
        beside: run in a second thread of the worker's process, beside whatever that is doing: for work that uses neither the
            device nor collectives.
    """

    def mark(method: Method) -> Method:
        method.__registration__ = Registration(mode, mesh, beside)  # type: ignore[attr-defined]
        return method

    return mark


def rows_of(value: Any) -> int | None:
    """Number of rows of what can be cut: a Batch, a list, or anything with `chunk` and a length; None for everything else."""
    return len(value) if isinstance(value, list) or hasattr(value, "chunk") else None


def cut(value: Any, share: Share) -> Any:
    """The share of a value that has rows; everything else whole."""
    if share == EVERYTHING or rows_of(value) is None:
        return value
    if isinstance(value, list):
        rows = share.range(len(value))
        return value[rows.start : rows.stop]
    return value.chunk(share.of)[share.index]


def places(sizes: Sequence[int], order: Sequence[int] | None, share: Share) -> list[tuple[int, int]]:
    """(part, row in it) of each row of a share of rows that lie in several parts.

    Args:
        sizes: rows of each part.
        order: the whole's rows, as positions in the parts one after the other; some may be left out, and some occur more than once. None
            leaves them as they lie.
        share: which rows of the whole.

    Raises:
        ValueError: `order` names a row that there is not.
    """
    starts = [0, *itertools.accumulate(sizes)]
    positions: Sequence[int] = range(starts[-1]) if order is None else order
    if strange := [position for position in positions if not 0 <= position < starts[-1]]:
        raise ValueError(f"there is no row {strange[0]}: the parts have {starts[-1]} rows, numbered from 0")
    wanted = [positions[row] for row in share.range(len(positions))]
    return [(part, position - starts[part]) for position in wanted for part in [bisect.bisect_right(starts, position) - 1]]


def assemble(fetch: Callable[[Sequence[int]], Sequence[Any]], sizes: Sequence[int], order: Sequence[int] | None, share: Share) -> Any:
    """A share of rows that lie in several parts, fetching only the parts that it needs.

    `fetch` gives the parts (batches or lists) with these numbers; the other arguments are those of `places`, whose errors this raises too.
    """
    wanted = places(sizes, order, share)
    needed = sorted({part for part, _ in wanted}) or [0]
    parts = list(fetch(needed))
    for part, value in zip(needed, parts, strict=True):
        if rows_of(value) != sizes[part]:
            raise AssertionError(f"part {part} was said to have {sizes[part]} rows and has {rows_of(value)}")
    offset = dict(zip(needed, itertools.accumulate((sizes[part] for part in needed), initial=0), strict=False))
    positions = [offset[part] + row for part, row in wanted]
    whole = parts[0] if len(parts) == 1 else DATA_PARALLEL.gather(parts)
    return whole if positions == list(range(len(whole))) else take(whole, positions)


def take(value: Any, positions: Sequence[int]) -> Any:
    """These rows of a batch or list, in this order."""
    if isinstance(value, list):
        return [value[position] for position in positions]
    import torch  # only what travels as a Batch needs it

    return value.rows(torch.tensor(positions, dtype=torch.int64))

"""How the arguments of a worker's method are spread over the ranks, and how the results are gathered."""

import itertools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

from engine.batch import Batch, concat
from engine.metrics import Statistics, merge

Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch(Enum):
    """Modes of `register`."""

    ALL = "all"
    """Every rank gets the same arguments; results come back as a list by rank."""
    DATA_PARALLEL = "data_parallel"
    """Batches and lists are cut into one contiguous part a rank, everything else goes to all; results are concatenated."""


def register(dispatch: Dispatch) -> Callable[[Method], Method]:
    """Marks a method of a worker class as callable through its `WorkerGroup`."""

    def mark(method: Method) -> Method:
        method.__dispatch__ = dispatch  # type: ignore[attr-defined]
        return method

    return mark


def split(argument: Any, ranks: int) -> list[Any]:
    """One argument for each rank: batches and lists in contiguous parts whose sizes differ by at most one, else the value itself."""
    if isinstance(argument, Batch):
        return list(argument.chunk(ranks))
    if isinstance(argument, list):
        base, longer = divmod(len(argument), ranks)
        starts = [rank * base + min(rank, longer) for rank in range(ranks + 1)]
        return [argument[start:stop] for start, stop in itertools.pairwise(starts)]
    return [argument] * ranks


def gather(results: Sequence[Any]) -> Any:
    """What the ranks of a data-parallel call returned, as one value: batches and lists concatenated, statistics merged.

    Raises `TypeError` for results of any other type, which have no meaning as a whole.
    """
    first = results[0]
    if isinstance(first, Batch):
        return concat(results)
    if isinstance(first, list):
        return [item for result in results for item in result]
    if isinstance(first, Statistics):
        return merge(results)
    raise TypeError(f"a data-parallel method must return a Batch, a list or Statistics, not {type(first).__name__}")

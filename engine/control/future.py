"""`BatchFuture`: what a call to a worker group returns at once."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from engine import batch
from engine.control.deadline import Call, wait
from engine.control.dispatch import EVERYTHING, Mode, Share, assemble, cut, places
from engine.control.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Parts:
    """Results of calls to a group, one part for each rank that speaks; what workers need to put their own share together."""

    references: Sequence[Any]
    operations: Sequence[int]
    """Number of the operation, in the trace, that made each part."""
    mode: Mode
    order: tuple[int, ...] | None = None

    def share(self, sizes: Sequence[int | None], share: Share) -> Any:
        """A share of the whole; `sizes` are the rows of each part, None where results have no rows. Fetches only the parts that it needs."""
        known = [size for size in sizes if size is not None]
        if self.mode.rowwise and len(known) == len(sizes):
            return assemble(lambda numbers: ray.get([self.references[number] for number in numbers]), known, self.order, share)
        if self.order is not None:
            raise TypeError("a result without rows has none to choose from")
        return cut(self.mode.gather(ray.get(list(self.references))), share)

    def origins(self, sizes: Sequence[int | None], share: Share) -> Mapping[int, float]:
        """How much of a share each operation made: parts of 1, by rows."""
        if len(set(self.operations)) == 1:
            return {self.operations[0]: 1.0}
        rows = Counter(self.operations[part] for part, _ in places([size or 0 for size in sizes], self.order, share))
        return {operation: rows[operation] / max(1, rows.total()) for operation in self.operations}


@dataclass(frozen=True)
class BatchFuture:
    """Results on their way, in Ray's object store.

    Handed to another call they go from worker to worker and never through the controller.
    """

    parts: Parts
    calls: Sequence[Call]
    """All calls; a rank that does not speak has one too."""
    spoken: Sequence[Call]
    """Those that `parts` come from."""
    deadline_seconds: float
    recorder: Recorder

    def get(self) -> Any:
        """Waits for every rank and brings the whole result to the controller. Raises `WorkerError`."""
        with self.recorder.waiting(self.calls[0].operator):
            wait(self.calls, self.deadline_seconds)
            reports = ray.get([call.report for call in self.spoken])
            value = self.parts.share([report.rows for report in reports], EVERYTHING)
        self.recorder.passed(sum(report.bytes_out for report in reports))
        return value

    def rows(self, positions: Sequence[int]) -> "BatchFuture":
        """Row i is what was row `positions[i]`; rows may be left out, and occur more than once. Nothing moves before somebody takes his share."""
        before = self.parts.order
        composed = tuple(positions) if before is None else tuple(before[position] for position in positions)
        return replace(self, parts=replace(self.parts, order=composed))


@dataclass(frozen=True)
class Joined:
    """Columns of several futures over the same rows, side by side once somebody takes his share."""

    futures: Sequence[BatchFuture]

    def get(self) -> batch.Batch:
        """The whole batch. Raises `WorkerError`, and `ValueError` if one key stands for different values."""
        return batch.join(*batch.aligned([future.get() for future in self.futures]))


def join(*futures: "BatchFuture | Joined") -> Joined:
    """Columns of several futures over the same rows, side by side: one argument for the next call."""
    return Joined([one for future in futures for one in (future.futures if isinstance(future, Joined) else [future])])


def stack(futures: Sequence[BatchFuture]) -> BatchFuture:
    """Rows of several calls of one method, one after the other, as each gave them. ValueError where rows have been chosen of one already."""
    first = futures[0]
    if any(future.parts.order is not None for future in futures):
        raise ValueError("rows are chosen after calls are stacked, not before: how many rows a call gives is known when it is done")
    parts = Parts(
        [reference for future in futures for reference in future.parts.references],
        [operation for future in futures for operation in future.parts.operations],
        first.parts.mode,
    )
    return replace(
        first, parts=parts, calls=[call for future in futures for call in future.calls], spoken=[call for future in futures for call in future.spoken]
    )

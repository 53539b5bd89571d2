"""`BatchFuture`: what a call to a worker group returns at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from engine import batch
from engine.control.deadline import Call, wait
from engine.control.dispatch import EVERYTHING, Mode, Share, assemble, cut
from engine.control.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Parts:
    """Results of one call to a group, one part for each rank that speaks; what workers need to put their own share together."""

    references: Sequence[Any]
    mode: Mode
    order: tuple[int, ...] | None = None

    def share(self, sizes: Sequence[int | None], share: Share) -> Any:
        """A share of the whole; `sizes` are the rows of each part, None where results have no rows. Fetches only the parts that it needs."""
        known = [size for size in sizes if size is not None]
        if self.mode.rowwise and len(known) == len(sizes):
            return assemble(lambda numbers: ray.get([self.references[number] for number in numbers]), known, self.order, share)
        if self.order is not None:
            raise TypeError("a result without rows cannot be reordered")
        return cut(self.mode.gather(ray.get(list(self.references))), share)


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
    operation: int
    """Its number in the trace."""
    recorder: Recorder

    def get(self) -> Any:
        """Waits for every rank and brings the whole result to the controller. Raises `WorkerError`."""
        with self.recorder.waiting(self.calls[0].operator):
            wait(self.calls, self.deadline_seconds)
            reports = ray.get([call.report for call in self.spoken])
            value = self.parts.share([report.rows for report in reports], EVERYTHING)
        self.recorder.passed(sum(report.bytes_out for report in reports))
        return value

    def reorder(self, order: Sequence[int]) -> "BatchFuture":
        """The same rows in another order: row i is what was row `order[i]`. Nothing moves before somebody takes his share."""
        before = self.parts.order
        composed = tuple(order) if before is None else tuple(before[position] for position in order)
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

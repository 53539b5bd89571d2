"""`BatchFuture`: what a call to a worker group returns at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.control.deadline import Call, wait


@dataclass(frozen=True)
class BatchFuture:
    """Results on their way, one part a rank, in Ray's object store.

    Handed to another data-parallel call over as many ranks, the parts go from worker to worker and never through the controller.
    """

    references: Sequence[Any]
    calls: Sequence[Call]
    gather: Callable[[Sequence[Any]], Any]
    deadline_seconds: float

    def get(self) -> Any:
        """Waits for every rank and brings the gathered result to the controller. Raises `WorkerError`."""
        return self.gather(wait(self.references, self.calls, self.deadline_seconds))

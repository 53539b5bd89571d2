"""Waiting for workers, never without a limit: who did not answer, and what he was doing."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray


@dataclass(frozen=True, slots=True)
class Call:
    """One call to one worker, as errors name it."""

    role: str
    rank: int
    operator: str

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank}, {self.operator}"


class WorkerError(RuntimeError):
    """A worker raised, died, or did not answer in time. The text names role, rank and operator, and holds the worker's traceback."""


def wait(references: Sequence[Any], calls: Sequence[Call], seconds: float) -> list[Any]:
    """Results of `references`, in order; fails at the first failure instead of waiting for ranks that wait for the failed one.

    Raises `WorkerError` naming the call that failed, or every call that did not answer within `seconds`.
    """
    call_of = dict(zip(references, calls, strict=True))
    pending = list(call_of)
    end = time.monotonic() + seconds
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            silent = "; ".join(str(call_of[reference]) for reference in pending)
            raise WorkerError(f"no answer within {seconds:g} s (resources.call_deadline_seconds) from: {silent}")
        for reference in ready:
            try:
                ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                plain = re.sub(r"\x1b\[\d+m", "", str(error))  # Ray colours its text, terminal or not
                raise WorkerError(f"{call_of[reference]} raised:\n{plain}") from error
            except ray.exceptions.RayActorError as error:
                raise WorkerError(f"{call_of[reference]}: the worker's process is gone. {error}") from error
    return ray.get(list(references))

"""Waiting for workers, never without a limit: who did not answer, and what he was doing."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

SECONDS_FOR_THE_CAUSE = 2.0


@dataclass(eq=False, slots=True)
class Call:
    """One call to one worker, as errors name it, and the small report that comes when it is done."""

    role: str
    rank: int
    operator: str
    step: int | None = None
    report: Any = None
    """Ray's reference to the report."""
    upstream: Sequence["Call"] = field(default=(), repr=False)
    """Calls whose results are its arguments."""

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank}, {self.operator}" + (f", step {self.step}" if self.step is not None else "")


class WorkerError(RuntimeError):
    """A worker raised, died, or did not answer in time. The text names role, rank, operator and step, and holds the worker's traceback."""


def wait(calls: Sequence[Call], seconds: float) -> list[Any]:
    """Reports of `calls`, in order; fails at the first failure instead of waiting for ranks that wait for the failed one.

    Whatever they depend on is waited for too, so that a failure further up the dataflow is told by its own name.
    Raises `WorkerError` naming the call that failed, or every call that did not answer within `seconds`.
    """
    end = time.monotonic() + seconds
    pending = {call.report: call for call in _with_upstream(calls)}
    while pending:
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            # What waits for another's result cannot be blamed for it.
            silent = [call for call in pending.values() if not any(other in pending.values() for other in call.upstream)]
            named = "; ".join(str(call) for call in silent)
            raise WorkerError(f"no answer within {seconds:g} s (resources.call_deadline_seconds) from: {named}")
        for reference in ready:
            call = pending.pop(reference)
            if (failure := _failure(call)) is not None:
                raise _first_cause(call, failure, pending)
            call.upstream = ()
    return list(ray.get([call.report for call in calls]))


def _with_upstream(calls: Iterable[Call]) -> list[Call]:
    """The calls and all that they depend on, those first that others depend on."""
    found: dict[Call, None] = {}

    def visit(call: Call) -> None:
        if call not in found:
            for other in call.upstream:
                visit(other)
            found[call] = None

    for call in calls:
        visit(call)
    return list(found)


def _failure(call: Call) -> Exception | None:
    try:
        ray.get(call.report)
    except (ray.exceptions.RayTaskError, ray.exceptions.RayActorError) as error:
        return error
    return None


def _first_cause(call: Call, failure: Exception, pending: Mapping[Any, Call]) -> WorkerError:
    if not isinstance(failure, ray.exceptions.RayActorError):
        # A process that is gone is the cause, though its peers' complaints about a closed connection may be heard first.
        end = time.monotonic() + SECONDS_FOR_THE_CAUSE
        waiting = dict(pending)
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            other = waiting.pop(ready[0])
            if isinstance(gone := _failure(other), ray.exceptions.RayActorError):
                return _error(other, gone)
    for other in _with_upstream([call])[:-1]:
        done, _ = ray.wait([other.report], timeout=0)
        if done and (earlier := _failure(other)) is not None:
            return _error(other, earlier)
    return _error(call, failure)


def _error(call: Call, failure: Exception) -> WorkerError:
    if isinstance(failure, ray.exceptions.RayActorError):
        error = WorkerError(f"{call}: the worker's process is gone. {failure}")
    else:
        plain = re.sub(r"\x1b\[\d+m", "", str(failure))  # Ray colours its text, terminal or not
        error = WorkerError(f"{call} raised:\n{plain}")
    error.__cause__ = failure
    return error

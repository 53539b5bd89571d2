"""Waiting for workers, never without a limit: who did not answer, and what he was doing."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

SECONDS_FOR_THE_CAUSE = 2.0
SECONDS_TO_ANSWER = 10.0
"""For a process that is asked where it stands."""
SECONDS_TO_ASK = 60.0
"""For all of that, the start of a process that asks included."""


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
    host: Any = field(default=None, repr=False)
    """The Ray actor that it went to."""
    number: int | None = None
    """By which the host knows it; None for what is asked of the host itself."""

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
            raise WorkerError(f"no answer within {seconds:g} s (resources.call_deadline_seconds) from: {named}\n{_where(silent)}")
        for reference in ready:
            call = pending.pop(reference)
            if (failure := _failure(call)) is not None:
                raise _first_cause(call, failure, pending)
            call.upstream = ()
    return list(ray.get([call.report for call in calls]))


def _where(silent: Sequence[Call]) -> str:
    """Where silent calls stand: what their processes say of themselves, asked past whatever still waits to be sent to them."""
    hosts = {call.host: [other for other in silent if other.host is call.host] for call in silent}

    # Ray sends calls of one caller in order, behind those that wait for their arguments: another caller is needed.
    @ray.remote(num_cpus=0, max_retries=0)
    def ask(hosts: list[Any], seconds: float) -> list[Any]:
        answers = [host.where.remote() for host in hosts]
        ready, _ = ray.wait(answers, num_returns=len(answers), timeout=seconds)
        return [ray.get(answer) if answer in ready else None for answer in answers]

    # A process that ended a moment ago fails all of it.
    try:
        answers = ray.get(ask.remote(list(hosts), SECONDS_TO_ANSWER), timeout=SECONDS_TO_ASK)
    except ray.exceptions.RayError as error:
        return f"Where they stand could not be asked: {type(error).__name__}"
    return "\n".join(_stand(calls, answer) for calls, answer in zip(hosts.values(), answers, strict=True))


def _stand(calls: Sequence[Call], answer: tuple[int, dict[int, str], str] | None) -> str:
    """What one process says of the calls that were made to it."""
    if answer is None:
        why = "it still starts, or is stopped, or library code holds its interpreter"
        return f"{'; '.join(map(str, calls))}: the process does not say where it stands: {why}"
    process, begun, stacks = answer
    said = [f"{call} {begun.get(call.number, 'has not begun')}" if call.number is not None else str(call) for call in calls]
    return f"{'; '.join(said)}. Process {process} stands at\n{stacks}"


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

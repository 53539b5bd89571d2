"""The dataflow of one training step as it ran: which operator worked when, on what, and how many bytes went where.

To be kept as JSON, to be opened in ui.perfetto.dev as a Chrome trace, or to be read as a page (`engine.control.trace_page`).
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import ConfigDict, TypeAdapter, with_config


class Interval(Protocol):
    """Anything that lasts from `started` to `ended`, in Unix seconds."""

    @property
    def started(self) -> float: ...  # noqa: D102
    @property
    def ended(self) -> float: ...  # noqa: D102


AnInterval = TypeVar("AnInterval", bound=Interval)


@dataclass(frozen=True, slots=True)
class Span:
    """One rank at work on one operation."""

    rank: int
    started: float
    """Unix seconds, by the clock of `node`."""
    ended: float
    bytes_in: int
    bytes_out: int
    process: int
    """The operating system's process id: ranks of several roles may share one process."""
    node: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a worker group's method."""

    id: int
    """Counts the calls in the order in which the controller made them."""
    role: str
    operator: str
    pool: str
    device: str
    spans: list[Span]
    """None for a call that has not run."""
    result_bytes: int

    @property
    def name(self) -> str:
        """`actor.log_prob`."""
        return f"{self.role}.{self.operator}"


@dataclass(frozen=True, slots=True)
class Edge:
    """The result of operation `source` is an argument of operation `target`."""

    source: int
    target: int
    bytes: int
    label: str


@dataclass(frozen=True, slots=True)
class ControllerSpan:
    """What the controller itself waited for, or did."""

    name: str
    started: float
    ended: float


@with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))  # of the parts as well
@dataclass(frozen=True, slots=True)
class Trace:
    """One step. ValueError where the ids of operations occur twice, or an edge does not go from an operation to a later one."""

    stage: str
    step: int
    operations: list[Operation]
    edges: list[Edge]
    controller: list[ControllerSpan]
    controller_bytes: int
    """That went through the controlling process."""
    batch_bytes: int
    """Of all results."""

    def __post_init__(self) -> None:
        known = {operation.id for operation in self.operations}
        if len(known) < len(self.operations):
            raise ValueError("trace: every operation has an id of its own, but some occur twice")
        for edge in self.edges:
            # A call can only be handed what was called before it; so a trace is free of cycles, which every drawing relies on.
            if edge.source not in known or edge.target not in known or edge.source >= edge.target:
                raise ValueError(f"trace: edge {edge.source} -> {edge.target} must go from a known operation to a later one")

    @property
    def intervals(self) -> list[Interval]:
        """All spans, those of the controller included."""
        return [*self.controller, *(span for operation in self.operations for span in operation.spans)]

    @property
    def started(self) -> float:
        """Unix seconds; 0 for a trace in which nothing ran."""
        return min((interval.started for interval in self.intervals), default=0.0)

    @property
    def ended(self) -> float:
        """Unix seconds."""
        return max((interval.ended for interval in self.intervals), default=0.0)


_ADAPTER = TypeAdapter(Trace)


def to_json(trace: Trace) -> str:
    """ValueError for a time that is not finite."""
    if not all(math.isfinite(time) for interval in trace.intervals for time in (interval.started, interval.ended)):
        raise ValueError("trace: a span's times must be finite")
    return _ADAPTER.dump_json(trace).decode()


def from_json(text: str) -> Trace:
    """What `to_json` wrote. ValueError names each field that is missing, unknown or of another type."""
    return _ADAPTER.validate_json(text)


def rows(intervals: Iterable[AnInterval]) -> list[list[AnInterval]]:
    """Spread over as few rows as possible so that those in a row follow each other: first fit by start is optimal for intervals."""
    spread: list[list[AnInterval]] = []
    for interval in sorted(intervals, key=lambda one: (one.started, one.ended)):
        for row in spread:
            if row[-1].ended <= interval.started:
                row.append(interval)
                break
        else:
            spread.append([interval])
    return spread


@dataclass(frozen=True, slots=True)
class Work:
    """A span, and the operation that it is a part of."""

    operation: Operation
    span: Span

    @property
    def started(self) -> float:
        """Unix seconds."""
        return self.span.started

    @property
    def ended(self) -> float:
        """Unix seconds."""
        return self.span.ended


@dataclass(frozen=True, slots=True)
class Lane:
    """What one process did: in rows, as a process may be at several calls at a time."""

    pool: str
    node: str
    process: int
    rows: list[list[Work]]

    @property
    def work(self) -> list[Work]:
        """Of all rows."""
        return [work for row in self.rows for work in row]

    @property
    def roles(self) -> list[str]:
        """That ran here, in order of their first call."""
        return list(dict.fromkeys(work.operation.role for work in self.work))

    @property
    def ranks(self) -> list[int]:
        """Usually one."""
        return sorted({work.span.rank for work in self.work})


def lanes(trace: Trace) -> list[Lane]:
    """One for each process, by pool, node, role and rank."""
    processes: dict[tuple[str, str, int], list[Work]] = defaultdict(list)
    for operation in trace.operations:
        for span in operation.spans:
            processes[operation.pool, span.node, span.process].append(Work(operation, span))
    found = [Lane(*process, rows(work)) for process, work in processes.items()]
    pools = list(dict.fromkeys(operation.pool for operation in trace.operations))
    return sorted(found, key=lambda lane: (pools.index(lane.pool), lane.node, lane.roles[0], lane.ranks, lane.process))


def to_chrome(trace: Trace) -> str:
    """In the Trace Event Format, for ui.perfetto.dev: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

    Each pool on each node is a process there and each of its processes a thread (several where it was at several calls at a time, because slices of
    one thread must not cross); the controller is a process of its own. Times are microseconds since the first span. One arrow for each edge.
    """
    events: list[dict[str, Any]] = []
    heads: list[dict[str, Any]] = []
    slices: dict[int, list[dict[str, Any]]] = defaultdict(list)
    began = trace.started

    def head(kind: str, pid: int, tid: int, name: str) -> None:
        heads.append({"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}})
        heads.append({"ph": "M", "name": f"{kind}_sort_index", "pid": pid, "tid": tid, "ts": 0, "args": {"sort_index": len(heads)}})

    def slice_(name: str, category: str, interval: Interval, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
        # Both ends are rounded, not the length: what followed each other still does.
        start, end = (round((time - began) * 1e6) for time in (interval.started, interval.ended))
        event = {"ph": "X", "name": name, "cat": category, "ts": start, "dur": max(0, end - start), "pid": pid, "tid": tid, "args": args}
        events.append(event)
        return event

    head("process", 1, 0, "controller")
    for number, waits in enumerate(rows(trace.controller)):
        head("thread", 1, 1001 + number, "controller")
        for wait in waits:
            slice_(wait.name, "controller", wait, 1, 1001 + number, {})
    pids: dict[tuple[str, str], int] = {}
    tid = 2000
    for lane in lanes(trace):
        if (lane.pool, lane.node) not in pids:
            pids[lane.pool, lane.node] = len(pids) + 2
            head("process", len(pids) + 1, 0, f"{lane.pool} on {lane.node}")
        pid = pids[lane.pool, lane.node]
        for row in lane.rows:
            tid += 1
            head("thread", pid, tid, f"{', '.join(lane.roles)} {', '.join(map(str, lane.ranks))} (process {lane.process})")
            for work in row:
                event = slice_(work.operation.name, work.operation.role, work, pid, tid, _arguments(work))
                slices[work.operation.id].append(event)
    events += _arrows(trace, slices)
    events.sort(key=lambda event: (event["ts"], "Xsf".index(event["ph"])))
    about = {"stage": trace.stage, "step": trace.step, "started_unix_seconds": trace.started}
    return json.dumps({"traceEvents": heads + events, "displayTimeUnit": "ms", "otherData": about})


def _arguments(work: Work) -> dict[str, Any]:
    span, operation = work.span, work.operation
    return {"operation": operation.id, "rank": span.rank, "device": operation.device, "bytes_in": span.bytes_in, "bytes_out": span.bytes_out}


def _arrows(trace: Trace, slices: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """From the rank that ended last to the rank that started first. None where one of them has not run.

    An arrow is bound to the slice that is open at its time on its thread, and must not go back in time, even where two nodes' clocks differ.
    """
    arrows = []
    for number, edge in enumerate(trace.edges):
        if not slices[edge.source] or not slices[edge.target]:
            continue
        source = max(slices[edge.source], key=lambda event: event["ts"] + event["dur"])
        target = min(slices[edge.target], key=lambda event: event["ts"])
        leaves = max(source["ts"], min(source["ts"] + source["dur"] - 1, target["ts"]))
        arrow = {"name": edge.label or "result", "cat": "dataflow", "id": number + 1, "args": {"bytes": edge.bytes}}
        arrows.append({**arrow, "ph": "s", "ts": leaves, "pid": source["pid"], "tid": source["tid"]})
        arrows.append({**arrow, "ph": "f", "bp": "e", "ts": max(leaves, target["ts"]), "pid": target["pid"], "tid": target["tid"]})
    return arrows


def covered(intervals: Sequence[Interval]) -> list[tuple[float, float]]:
    """The union of the intervals, as (start, end) in order, without overlaps."""
    union: list[tuple[float, float]] = []
    for interval in sorted(intervals, key=lambda one: one.started):
        start, end = interval.started, max(interval.started, interval.ended)
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((start, end))
    return union

"""Takes down the dataflow of a step while it runs; `trace.py` says what is made of it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import ray

from engine.control.deadline import Call
from engine.control.trace import ControllerSpan, Edge, Operation, Span, Trace


@dataclass(frozen=True, slots=True)
class _Sent:
    """One operator as it was sent off."""

    role: str
    operator: str
    pool: str
    device: str
    calls: Sequence[Call]
    speaking: Sequence[Call]
    sources: Sequence[int]


@dataclass
class Recorder:
    """Shared by all groups. Between `begin` and `finish` every operator and every byte of the controller is taken down."""

    stage: str = ""
    step: int | None = None
    keep: Path | None = None
    """Directory for the calls of this step; None keeps none."""
    _sent: list[_Sent] = field(default_factory=list)
    _waits: list[ControllerSpan] = field(default_factory=list)
    _bytes: int = 0

    def begin(self, stage: str, step: int, keep: Path | None = None) -> None:
        """A step begins."""
        self.stage, self.step, self.keep = stage, step, keep
        self._sent, self._waits, self._bytes = [], [], 0

    def finish(self) -> Trace:
        """The step as it ran. Every call must have been waited for."""
        assert self.step is not None, "finish without begin"
        operations, edges, batch_bytes = [], [], 0
        for number, sent in enumerate(self._sent):
            reports = ray.get([call.report for call in sent.calls])
            ranks = [call.rank for call in sent.calls]
            spans = [
                Span(rank, report.started, report.ended, sum(report.bytes_in.values()), report.bytes_out, report.process, report.node)
                for rank, report in zip(ranks, reports, strict=True)
            ]
            result_bytes = sum(report.bytes_out for call, report in zip(sent.calls, reports, strict=True) if call in sent.speaking)
            operations.append(Operation(number, sent.role, sent.operator, sent.pool, sent.device, spans, result_bytes))
            batch_bytes += result_bytes
            for source in dict.fromkeys(sent.sources):
                taken = sum(report.bytes_in.get(source, 0) for report in reports)
                edges.append(Edge(source, number, taken, f"{operations[source].role}.{operations[source].operator}"))
        trace = Trace(self.stage, self.step, [*operations, *self._asides(len(operations))], edges, self._waits, self._bytes, batch_bytes)
        self.step = self.keep = None
        return trace

    def _asides(self, first: int) -> list[Operation]:
        """Calls from worker to worker, one operation for each operator of a role."""
        found: dict[tuple[str, str], Operation] = {}
        for sent in self._sent:
            for call in sent.calls:
                report = ray.get(call.report)
                for aside in report.aside:
                    key = (sent.role, aside.operator)
                    empty = Operation(first + len(found), sent.role, aside.operator, sent.pool, sent.device, [], 0)
                    span = Span(call.rank, aside.started, aside.ended, aside.bytes_in, 0, report.process, report.node)
                    found.setdefault(key, empty).spans.append(span)
        return list(found.values())

    @property
    def operations(self) -> int:
        """Operators sent off in this step so far."""
        return len(self._sent)

    def sent(self, role: str, operator: str, pool: str, device: str, calls: Sequence[Call], speaking: Sequence[Call], sources: Sequence[int]) -> int:
        """An operator was sent off. Returns its number, by which later ones name their source; -1 outside a step."""
        if self.step is None:
            return -1
        known = [source for source in sources if source >= 0]
        self._sent.append(_Sent(role, operator, pool, device, calls, speaking, known))
        return len(self._sent) - 1

    def passed(self, size: int) -> None:
        """So many bytes of values went through the controller."""
        self._bytes += size

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """The controller waits for something."""
        started = time.time()
        try:
            yield
        finally:
            if self.step is not None:
                self._waits.append(ControllerSpan(name, started, time.time()))

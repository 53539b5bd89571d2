"""The ranks of one role, called as if they were one object."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from engine.control.deadline import Call
from engine.control.dispatch import DEFAULT_MESH, EACH, RANK_ZERO, Mode, Registration, Share
from engine.control.future import BatchFuture, Joined, Parts
from engine.control.host import FromWorkers, Invocation, size_of
from engine.control.mesh import Mesh
from engine.control.recorder import Recorder
from engine.control.resources import Pool

INLINE_BYTES = 100_000
"""Ray sends smaller values with the call itself."""
_NUMBERS = itertools.count()
"""Of calls, of all groups."""


@dataclass(frozen=True)
class Outlet:
    """A way from one worker to the workers of another role, past the controller. Given to a worker as an ordinary argument."""

    hosts: Sequence[Any]
    role: str
    operator: str
    mesh: Mesh

    def tell(self, values: Mapping[int, Any], rows: int) -> None:
        """Sends values by row to the ranks whose shares of `rows` hold them; returns at once, and nobody waits for an answer."""
        speaker = {part: rank for rank, part in reversed(list(enumerate(self.mesh.part))) if self.mesh.speaks[rank]}
        for part, rank in speaker.items():
            share = Share(part, self.mesh.parts).range(rows)
            if chosen := [value for row, value in values.items() if row in share]:
                self.hosts[rank].tell.remote(self.role, self.operator, chosen)


class WorkerGroup:
    """One worker of a class in each process of a pool; every `@register`ed method of the class is a method of the group.

    Args:
        role: its name in errors, traces and `resources.roles`.
        worker_class: what to make.
        arguments: given to each worker's constructor; `rank` and `ranks` come beside them.
        pool: where the workers sit.
        deadline_seconds: how long any call may take.
        recorder: shared with the other groups of a run.
    """

    def __init__(
        self,
        role: str,
        worker_class: type,
        arguments: Mapping[str, Any],
        pool: Pool,
        deadline_seconds: float,
        recorder: Recorder | None = None,
    ) -> None:
        self.role, self.pool, self.ranks = role, pool, len(pool.hosts)
        self.recorder = recorder or Recorder()
        self._class = worker_class
        self._deadline_seconds = deadline_seconds
        given = [(role, worker_class, {**arguments, "rank": rank, "ranks": self.ranks}) for rank in range(self.ranks)]
        # Only the workers import what knows their meshes.
        named: Mapping[str, Mesh] = pool.ask("add", deadline_seconds, given)[0]
        self._meshes = {DEFAULT_MESH: Mesh.grouped(self.ranks), **named}

    def __getattr__(self, name: str) -> Callable[..., BatchFuture]:
        registration = getattr(getattr(self._class, name, None), "__registration__", None)
        if registration is None:
            raise AttributeError(f"{self.role} workers have no registered method {name!r}")
        return functools.partial(self._call, name, registration)

    def mesh(self, name: str) -> Mesh:
        """The mesh with this name."""
        return self._meshes[name]

    def outlet(self, operator: str, mesh: str = DEFAULT_MESH) -> Outlet:
        """A way for other workers to tell these something."""
        return Outlet(self.pool.hosts, self.role, operator, self._meshes[mesh])

    def replay(self, paths: Sequence[Path]) -> list[tuple[Any, Any]]:
        """Runs a kept call once more, one path a rank. Returns (kept, new) results by rank. Raises `WorkerError`."""
        return self.pool.ask("replay", self._deadline_seconds, [(path,) for path in paths], ranks=range(len(paths)))

    def _call(self, operator: str, registration: Registration, *arguments: Any, **named: Any) -> BatchFuture:
        """Sends one call to every rank that the mode names, and returns at once."""
        mode, mesh = registration.mode, self._meshes[registration.mesh]
        given = [*arguments, *named.values()]
        futures = [future for argument in given for future in _futures(argument)]
        reports = list(dict.fromkeys(call.report for future in futures for call in future.spoken))
        upstream = tuple(dict.fromkeys(call for future in futures for call in future.calls))
        recorder, calls, results = self.recorder, [], []
        number, shared = recorder.operations, dict[int, Any]()
        for rank in mode.ranks(mesh):
            host, call = self.pool.hosts[rank], Call(self.role, rank, operator, recorder.step, upstream=upstream)
            call.host, call.number = host, next(_NUMBERS)
            keep = None if recorder.keep is None else recorder.keep / f"{number:03d}.{self.role}.{operator}.{rank}.pickle"
            invocation = Invocation(self.role, operator, tuple(named), call.number, len(reports), bool(futures), keep)
            values = [self._value(argument, mode, mesh, rank, reports, shared) for argument in given]
            if futures:
                host.fetch.options(name=f"{call}: arguments").remote(call.number, len(reports), *reports, *values)
                values = []
            method = host.call_beside if registration.beside else host.call
            # Named, so that an error in a worker's log tells where it belongs. Reports go to both: where one is an error, neither runs.
            result, call.report = method.options(name=str(call)).remote(invocation, *reports, *values)
            calls.append(call)
            results.append(result)
        speaking = [mode.speaks(mesh, call.rank) for call in calls]
        spoken = [call for call, speaks in zip(calls, speaking, strict=True) if speaks]
        sources = [operation for future in futures for operation in future.parts.operations]
        operation = recorder.sent(self.role, operator, self.pool.name, self.pool.device, calls, spoken, sources)
        parts = Parts([result for result, speaks in zip(results, speaking, strict=True) if speaks], [operation] * len(spoken), mode)
        return BatchFuture(parts, calls, spoken, self._deadline_seconds, recorder)

    def _value(self, argument: Any, mode: Mode, mesh: Mesh, rank: int, reports: Sequence[Any], shared: dict[int, Any]) -> Any:
        """What one rank is sent of an argument. What is large and the same for all is put into the object store once (`shared`)."""
        futures = _futures(argument)
        if not futures:
            if id(argument) in shared:
                return shared[id(argument)]
            value = mode.spread(argument, mesh, rank)
            size = size_of(value)
            self.recorder.passed(size)
            if value is argument and size > INLINE_BYTES:
                value = shared[id(argument)] = ray.put(value)
            return value
        parts = tuple(future.parts for future in futures)
        spoken = [future.spoken for future in futures]
        if mode is EACH and not parts[0].mode.rowwise:
            # Item r of a list by rank is what rank r returned.
            parts, spoken = (Parts([parts[0].references[rank]], [parts[0].operations[rank]], RANK_ZERO),), [[spoken[0][rank]]]
        positions = tuple(tuple(reports.index(call.report) for call in calls) for calls in spoken)
        return FromWorkers(parts, positions, mode.share(mesh, rank))


def _futures(argument: Any) -> Sequence[BatchFuture]:
    if isinstance(argument, Joined):
        return argument.futures
    return [argument] if isinstance(argument, BatchFuture) else []

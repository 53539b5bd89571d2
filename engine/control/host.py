"""The Ray actor that stands for one process of a pool: it holds one worker of each role that sits there, and runs their methods."""

import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray

from engine.batch import Batch, aligned, join
from engine.control import stacks
from engine.control.dispatch import Share, rows_of
from engine.control.future import Parts
from engine.control.mesh import Mesh


@dataclass(frozen=True, slots=True)
class FromWorkers:
    """An argument that lies in workers: which share of which results the worker is to fetch."""

    parts: tuple[Parts, ...]
    """One, or several whose columns are joined."""
    reports: tuple[tuple[int, ...], ...]
    """For each of `parts`, where among the call's reports those of its parts stand."""
    share: Share


@dataclass(frozen=True, slots=True)
class Invocation:
    """What one call asks of a host, beside its arguments."""

    role: str
    operator: str
    keywords: tuple[str, ...]
    """Names of the last so many arguments."""
    number: int
    """Of the call; no other call of the controller has it."""
    reports: int
    """So many of the call's values are reports of earlier calls; they come first."""
    fetched: bool
    """Whether `fetch` brings the arguments, because some lie in workers; then they are not among the call's values."""
    keep: Path | None
    """Where arguments and result are to be kept."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the controller is told of a call: little enough that nobody minds that it passes through there."""

    rows: int | None
    """Of the result; None where it has no rows."""
    bytes_out: int
    bytes_in: Mapping[int, int]
    """Bytes that were taken of each operation's result."""
    started: float
    """Unix time, seconds; after the arguments were there."""
    ended: float
    process: int
    node: str
    aside: tuple["Aside", ...] = ()
    """What the role did in its second thread since its last report."""


@dataclass(frozen=True, slots=True)
class Aside:
    """A call that came from another worker, not from the controller."""

    operator: str
    bytes_in: int
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class Kept:
    """A call as it was kept on the disk."""

    invocation: Invocation
    arguments: tuple[Any, ...]
    result: Any


@dataclass
class _Role:
    worker: Any
    asides: list[Aside] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)


_WAITS = "waits for its arguments"

Fetched = tuple[tuple[Any, ...], dict[int, int]]
"""Arguments, and the bytes that were taken of each operation's result."""


class WorkerHost:
    """One process. Calls of one thread run in the order in which they come; those marked `beside` run in a second thread.

    A third thread, and no other, is given references to results. Ray 2.60 cannot have two threads of a process borrow the same object one after
    the other: what the first gives up is taken out of the process's store a moment after it stopped being counted, and if the second came in
    between, it waits for it for ever.
    """

    def __init__(self, log: Path | None) -> None:
        if log is not None:
            _log_to(log)
        self._roles: dict[str, _Role] = {}
        self._fetched: dict[int, Future[Fetched]] = {}
        self._begun: dict[int, str] = {}
        self._fetching: set[int] = set()
        self._node = ray.get_runtime_context().get_node_id()[:8]

    def free_address(self) -> tuple[str, int]:
        """This node's address and a port that is free on it, for the ranks to meet at."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def connect(self, address: tuple[str, int], rank: int, ranks: int, device: str, timeout_seconds: float) -> None:
        """Joins the process group of the pool's ranks: gloo, and NCCL beside it on GPUs."""
        import torch.distributed as dist

        host, port = address
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=timeout_seconds))

    def add(self, role: str, worker_class: type, arguments: Mapping[str, Any]) -> Mapping[str, Mesh]:
        """Makes this process's worker of a role. Returns the meshes that it names beside `data`."""
        worker = worker_class(**arguments)
        self._roles[role] = _Role(worker)
        return worker.meshes() if hasattr(worker, "meshes") else {}

    @ray.method(num_returns=2)
    def call(self, invocation: Invocation, *values: Any) -> tuple[Any, Report]:
        """Runs a method. `values` are `invocation.reports` reports, then the arguments. Returns the result and the report."""
        role = self._roles[invocation.role]
        with self._standing(invocation.number):
            arguments, taken = self._awaited(invocation.number) if invocation.fetched else (values[invocation.reports :], {})
            self._begun[invocation.number] = "is running"
            started = time.time()
            result = _run(role.worker, invocation, arguments)
            ended = time.time()
            if invocation.keep is not None:
                keep(Kept(invocation, arguments, result), invocation.keep)
            with role.lock:
                asides, role.asides = tuple(role.asides), []
            report = Report(rows_of(result), size_of(result), taken, started, ended, os.getpid(), self._node, asides)
        return result, report

    @ray.method(num_returns=0, concurrency_group="fetch")
    def fetch(self, number: int, reports: int, *values: Any) -> None:
        """Puts the arguments of a call together, in the thread for it. `values` are so many `reports`, then the arguments as they were sent."""
        taken: dict[int, int] = {}
        future = self._fetched.setdefault(number, Future())
        self._fetching.add(number)
        try:
            future.set_result((tuple(_argument(value, values[:reports], taken) for value in values[reports:]), taken))
        except Exception as error:  # noqa: BLE001 - the call raises it
            future.set_exception(error)
        finally:
            self._fetching.discard(number)

    @ray.method(concurrency_group="inquiry")
    def where(self) -> tuple[int, dict[int, str], str]:
        """For a controller that waits in vain: process, what each call that has begun does, by number, and where the threads stand.

        Nothing but built-in types, because a process may ask that cannot import `engine`.
        """
        # Ray unpickles for one thread at a time: while a call's arguments arrive slowly, the call itself may not get in.
        fetching = dict.fromkeys(self._fetching.copy(), _WAITS)
        return os.getpid(), fetching | self._begun, stacks.text()

    @ray.method(num_returns=2, concurrency_group="beside")
    def call_beside(self, invocation: Invocation, *values: Any) -> tuple[Any, Report]:
        """As `call`, in the second thread."""
        return self.call(invocation, *values)

    @ray.method(num_returns=0, concurrency_group="beside")
    def tell(self, role: str, operator: str, value: Any) -> None:
        """A message from another worker. Nobody waits for it: what fails goes to the log, and a later call of the role does it again and is heard."""
        started = time.time()
        try:
            getattr(self._roles[role].worker, operator)(value)
        except Exception:  # noqa: BLE001 - whatever it is, see above
            traceback.print_exc()
            return
        with self._roles[role].lock:
            self._roles[role].asides.append(Aside(operator, size_of(value), started, time.time()))

    def replay(self, path: Path) -> tuple[Any, Any]:
        """Runs a kept call once more on the worker as it is now. Returns the kept result and the new one."""
        kept: Kept = pickle.loads(path.read_bytes())
        return kept.result, _run(self._roles[kept.invocation.role].worker, kept.invocation, kept.arguments)

    @contextmanager
    def _standing(self, number: int) -> Iterator[None]:
        self._begun[number] = _WAITS
        try:
            yield
        finally:
            del self._begun[number]

    def _awaited(self, number: int) -> Fetched:
        try:
            return self._fetched.setdefault(number, Future()).result()
        finally:
            del self._fetched[number]


def _argument(value: Any, reports: Sequence[Report], taken: dict[int, int]) -> Any:
    if not isinstance(value, FromWorkers):
        return value
    columns = []
    for parts, positions in zip(value.parts, value.reports, strict=True):
        sizes = [reports[position].rows for position in positions]
        columns.append(parts.share(sizes, value.share))
        size = size_of(columns[-1])
        for operation, part in parts.origins(sizes, value.share).items():
            taken[operation] = taken.get(operation, 0) + round(part * size)
    return columns[0] if len(columns) == 1 else join(*aligned(columns))


def _run(worker: Any, invocation: Invocation, arguments: Sequence[Any]) -> Any:
    positional = len(arguments) - len(invocation.keywords)
    named = dict(zip(invocation.keywords, arguments[positional:], strict=True))
    return getattr(worker, invocation.operator)(*arguments[:positional], **named)


def size_of(value: Any) -> int:
    """Bytes of a value on its way: tensors as they are, everything else pickled."""
    if isinstance(value, Batch):
        return value.nbytes + (len(pickle.dumps((value.objects, value.meta), protocol=5)) if value.objects or value.meta else 0)
    return len(ray.cloudpickle.dumps(value, protocol=5))


def keep(call: Kept, path: Path) -> None:
    """Writes a call whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(ray.cloudpickle.dumps(call, protocol=5))
    beside.replace(path)


def _log_to(path: Path) -> None:
    """Sends everything that this process prints, libraries written in C included, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())

"""Runs rewards in processes of their own, which are killed where they take too long and replaced where they die.

A reward is somebody's function over a text that a policy wrote: it may loop for ever, inside C too, end its process, or ask for all the memory
there is. What it does concerns one sample, whose outcome then says so. This keeps faults apart from the run; it is no sandbox against malice.
"""

import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import send_handle
from typing import Any

from engine.config import RewardRunnerConfig
from engine.rewards.process import timed_out
from engine.rewards.types import Canary, Function, Limits, Outcome, Sample

LOAD_SECONDS = 120.0
"""Functions that are not loaded by then never will be."""
GRACE_SECONDS = 0.3
"""An async function's own process ends its calls at the limit, and has so long to say so."""
LONG_SECONDS = 0.25
"""A call that has taken so long may hang: another process takes the next sample."""
LAST_BREATH_SECONDS = 0.2
"""A process that ends closes its connection a moment before it is known how it ended."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Threads of number libraries would take address space, which is limited, and cores, which are not there."""


class RewardError(RuntimeError):
    """Rewards cannot be given: a function cannot be loaded, its known answers come out wrong, or it fails too often."""


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    key: str
    sample: Sample
    parameters: Mapping[str, Any] | None
    future: "Future[Outcome]" = field(default_factory=Future)


@dataclass(eq=False)
class _Process:
    pid: int
    connection: Connection
    running: dict[int, _Job] = field(default_factory=dict)
    began: float = 0.0
    """When its call did."""
    deadline: float | None = None
    """Of its call; None while it has none. It may have said the outcome of all samples before it says that the call is over."""


class RewardRunner:
    """Processes that are kept warm, and a thread that gives them samples and watches the clock.

    The functions are loaded once, by a process that is forked whenever another is needed: that takes milliseconds, whatever they import.
    The limit of a sample counts from the moment at which its call begins. Where a call with several samples fails as a whole (a batch function, or
    an event loop that a function blocks), its unanswered samples are run again, each alone: only the one to blame fails.

    Args:
        functions: the rewards by a key of the caller's.
        config: number of processes, and limits.
    """

    def __init__(self, functions: Mapping[str, Function], config: RewardRunnerConfig) -> None:
        self._functions, self._config = dict(functions), config
        self._queues: dict[str, deque[_Job]] = {key: deque() for key in functions}
        self._alone: deque[_Job] = deque()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        self._broken: Exception | None = None
        self._wake, self._woken = Pipe()
        self._waking = False
        self.canaries: Future[Mapping[str, Sequence[Canary]]] = Future()
        """By key; known when the functions are loaded. Raises `RewardError` where a function cannot be loaded."""
        # The kernel kills the processes when the thread that started them ends, so it must be this one.
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    def submit(self, key: str, sample: Sample, parameters: Mapping[str, Any] | None = None) -> "Future[Outcome]":
        """Asks for a sample's outcome; returns at once. `parameters` takes the place of the function's own."""
        with self._lock:
            job = _Job(next(self._numbers), key, sample, parameters)
            if self._broken is not None:
                job.future.set_exception(self._broken)
            else:
                # Other parameters are another function, which does not share a call.
                (self._queues[key] if parameters is None else self._alone).append(job)
                self._notify()
        return job.future

    def close(self) -> None:
        """Kills the processes. Samples that have no outcome raise `RewardError`."""
        with self._lock:
            self._broken = self._broken or RewardError("the reward runner was closed")
            self._notify()
        self._thread.join()

    def pids(self) -> list[int]:
        """Of the processes as they are now."""
        return [process.pid for process in list(self._processes)]

    def _notify(self) -> None:
        """Wakes the thread, under the lock; once is enough until it has looked, and more might fill the pipe."""
        if not self._waking and not self._wake.closed:
            self._wake.send_bytes(b".")
            self._waking = True

    def _run(self) -> None:
        here, there = Pipe()
        # What can be imported here can be imported there, whatever sys.path was made of.
        path = os.pathsep.join(os.path.abspath(directory) for directory in sys.path)
        with there:
            source = subprocess.Popen(
                [sys.executable, "-m", "engine.rewards.process", str(there.fileno()), str(os.getpid())],
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        self._control = here
        try:
            self._load()
            while self._broken is None:
                while len(self._processes) < min(self._config.processes + self._long(), self._config.max_processes):
                    self._processes.append(self._fork())
                self._give()
                self._look(wait([self._woken, *(process.connection for process in self._processes)], self._patience()))
        except (EOFError, ConnectionError):
            self._broken = self._broken or RewardError("the process that loads and forks the rewards has ended")
        except Exception as error:  # noqa: BLE001 - nobody may wait for an outcome that will never come
            self._broken = self._broken or error
        for process in self._processes:
            with suppress(EOFError, OSError):  # where the source is gone, the kernel has ended them
                self._bury(process, 0)
        source.kill()
        source.wait()
        with self._lock:
            assert self._broken is not None
            running = [job for process in self._processes for job in process.running.values()]
            for job in [*running, *self._alone, *(job for queue in self._queues.values() for job in queue)]:
                job.future.set_exception(self._broken)
            if not self.canaries.done():
                self.canaries.set_exception(self._broken)
            for connection in (self._wake, self._woken, self._control):
                connection.close()

    def _load(self) -> None:
        """Has the functions loaded, and takes their canaries. Returns early when the runner is closed."""
        memory_bytes, names = int(self._config.memory_limit_megabytes * 10**6), ", ".join(function.name for function in self._functions.values())
        self._control.send((self._functions, Limits(self._config.time_limit_seconds, memory_bytes)))
        end = time.monotonic() + LOAD_SECONDS
        while self._broken is None:
            spoken = wait([self._control, self._woken], max(0.0, end - time.monotonic()))
            if not spoken:
                raise RewardError(f"loading {names} took more than {LOAD_SECONDS:g} s; what does the import of a reward do?")
            self._awake(spoken)
            if self._control in spoken:
                try:
                    known = self._control.recv()
                except EOFError:
                    raise RewardError(f"a process ended while it loaded {names}; its log says why") from None
                if isinstance(known, str):
                    raise RewardError(known)
                self.canaries.set_result(known)
                return

    def _fork(self) -> _Process:
        here, there = Pipe()
        with there:
            self._control.send(None)
            send_handle(self._control, there.fileno(), None)
            return _Process(self._control.recv(), here)

    def _bury(self, process: _Process, patience_seconds: float) -> str:
        """Ends a process and whatever it started. Returns how it ended, for people."""
        process.connection.close()
        self._control.send((process.pid, patience_seconds))
        code = self._control.recv()
        return "had to be killed" if code is None else f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

    def _give(self) -> None:
        """Gives what waits to the processes that are free, which read what they are sent."""
        for process in list(self._processes):
            if process.deadline is None and (jobs := self._next()):
                grace = GRACE_SECONDS if self._functions[jobs[0].key].samples_at_once > 1 else 0
                process.running = {job.number: job for job in jobs}
                process.began = time.monotonic()
                process.deadline = process.began + self._config.time_limit_seconds + grace
                try:
                    process.connection.send((jobs[0].key, jobs[0].parameters, list(process.running), [job.sample for job in jobs]))
                except OSError:
                    self._replace(process, None)

    def _next(self) -> list[_Job]:
        """The samples of the next call: the one that waits longest, and others of its function where that takes several."""
        with self._lock:
            if self._alone:
                return [self._alone.popleft()]
            waiting = [queue for queue in self._queues.values() if queue]
            if not waiting:
                return []
            queue = min(waiting, key=lambda queue: queue[0].number)
            number = min(len(queue), self._functions[queue[0].key].samples_at_once)
            return [queue.popleft() for _ in range(number)]

    def _long(self) -> int:
        """Calls that may hang."""
        return sum(process.deadline is not None and time.monotonic() >= process.began + LONG_SECONDS for process in self._processes)

    def _patience(self) -> float | None:
        """Seconds until the first deadline, or until the first call has taken long."""
        now, moments = time.monotonic(), list[float]()
        for process in self._processes:
            if process.deadline is not None:
                long = process.began + LONG_SECONDS
                moments += [process.deadline, *([long] if long > now else [])]
        return max(0.0, min(moments) - now) if moments else None

    def _awake(self, spoken: Sequence[Any]) -> None:
        if self._woken in spoken:
            with self._lock:
                self._woken.recv_bytes()
                self._waking = False

    def _look(self, spoken: Sequence[Any]) -> None:
        self._awake(spoken)
        for process in list(self._processes):
            if process.connection in spoken:
                self._hear(process)
            elif process.deadline is not None and time.monotonic() >= process.deadline:
                self._replace(process, timed_out(self._config.time_limit_seconds))

    def _hear(self, process: _Process) -> None:
        """Takes one message."""
        try:
            message = process.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            self._replace(process, None)
            return
        if isinstance(message, tuple):
            number, outcome = message
            process.running.pop(number).future.set_result(outcome)
        else:
            process.deadline = None
            self._again(process)
            if not message:
                self._replace(process, None)
            elif len(self._processes) > self._config.processes + self._long():
                self._processes.remove(process)  # The calls that it was to make up for are over.
                self._bury(process, 0)

    def _replace(self, process: _Process, outcome: Outcome | None) -> None:
        """Ends a process. Its last sample without an outcome gets this one, or an error; of several, each is run again alone."""
        self._processes.remove(process)
        how = self._bury(process, LAST_BREATH_SECONDS if outcome is None else 0)
        if len(process.running) == 1:
            (job,) = process.running.values()
            process.running = {}
            job.future.set_result(outcome or Outcome("error", reason=f"its process {how}"))
        self._again(process)

    def _again(self, process: _Process) -> None:
        """Samples without an outcome of a call that is over are to run again, each alone."""
        with self._lock:
            self._alone.extend(process.running.values())
        process.running = {}

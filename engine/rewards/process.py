"""The processes that run rewards. One loads the functions and is forked whenever another is wanted; those may hang, crash or grow.

`python -m engine.rewards.process CONNECTION PARENT` starts the first one. It imports neither torch nor Ray nor the configuration, inherits nothing of
the process that started it, and calls no function of somebody's own: so it is always there to fork and to bury, in milliseconds.
"""

import asyncio
import ctypes
import importlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path

from engine.rewards.calling import Call, failed
from engine.rewards.registry import REWARDS
from engine.rewards.types import Canary, Function, Limits, Outcome, Sample

PR_SET_PDEATHSIG = 1
Send = Callable[[int, Outcome], None]
"""Position of a sample in its call, and what became of it."""


def main(control: Connection, parent: int) -> None:
    """Loads the functions, then forks and buries as it is told.

    Messages in: (functions by key, limits); then None, with a connection for the process that is to be forked, or (pid, seconds) of one to be buried,
    which is given so many seconds to end by itself. Answers: the canaries of the functions, or why they cannot be loaded (text); then the pid, or
    the status with which it had ended, None if it had to be killed.
    """
    die_with(parent)
    functions, limits = control.recv()
    try:
        calls = {key: Call.of(REWARDS.get(function.name), function) for key, function in functions.items()}
        known = {key: canaries(function) for key, function in functions.items()}
    except ValueError as error:
        control.send(str(error))
        return
    control.send(known)
    me = os.getpid()
    with suppress(EOFError):
        while True:
            match control.recv():
                case None:
                    descriptor = recv_handle(control)
                    if (pid := os.fork()) == 0:
                        control.close()
                        _forked(Connection(descriptor), calls, limits, me)
                    with suppress(OSError):
                        os.setpgid(pid, pid)  # as it does itself, whoever is first
                    os.close(descriptor)
                    control.send(pid)
                case pid, seconds:
                    control.send(bury(pid, seconds))


def bury(pid: int, seconds: float) -> int | None:
    """Kills a process and all that it started; how it had ended before, if it had within so many seconds."""
    end, status = time.monotonic() + seconds, None
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.002)
    if found[0]:
        status = os.waitstatus_to_exitcode(found[1])
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return status


def _forked(connection: Connection, calls: Mapping[str, Call], limits: Limits, parent: int) -> None:
    """The life of a forked process; it never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        die_with(parent)
        work(connection, calls, limits)
        code = 0
    except BaseException:  # noqa: BLE001 - what called this is another process's business
        traceback.print_exc()
    finally:
        os._exit(code)


def work(connection: Connection, calls: Mapping[str, Call], limits: Limits) -> None:
    """Answers until nobody asks any more.

    Messages in: (key, parameters or None, numbers, samples). Messages out: (number, outcome) for each sample and, at the end of each call, whether
    this process can be given another one.
    """
    start_bytes = limit_memory(limits.memory_bytes)
    with asyncio.Runner() as runner, suppress(EOFError):
        while True:
            key, parameters, numbers, samples = connection.recv()
            call = calls[key] if parameters is None else replace(calls[key], parameters=parameters)
            send = partial(_send, connection, numbers)
            if call.is_async and call.fields:
                runner.run(_side_by_side(call, samples, limits.seconds, send))
            else:
                _together(call, samples, runner, send)
            # A function that keeps something of every sample would fail one day on a sample that is not to blame.
            connection.send(address_space() - start_bytes < limits.memory_bytes / 2)


def _send(connection: Connection, numbers: Sequence[int], position: int, outcome: Outcome) -> None:
    connection.send((numbers[position], outcome))


def _together(call: Call, samples: Sequence[Sample], runner: asyncio.Runner, send: Send) -> None:
    """One call for all samples; where it fails with several, none of them has an outcome."""
    try:
        answer = call(samples)
        outcomes = call.outcomes(runner.run(answer) if call.is_async else answer, samples)
    except BaseException as error:  # noqa: BLE001 - whatever it is, SystemExit included, it is this call's result
        # Of several samples nobody knows whose fault it is: without outcomes they come again, each alone.
        outcomes = [failed(error)] if len(samples) == 1 else []
    for position, outcome in enumerate(outcomes):
        send(position, outcome)


async def _side_by_side(call: Call, samples: Sequence[Sample], seconds: float, send: Send) -> None:
    """A call for each sample, all in one event loop, each with the limit."""

    async def one(position: int) -> None:
        try:
            async with asyncio.timeout(seconds) as limit:
                answer = await call([samples[position]])
            (outcome,) = call.outcomes(answer, [samples[position]])
        except BaseException as error:  # noqa: BLE001 - as above
            outcome = timed_out(seconds) if limit.expired() else failed(error)
        send(position, outcome)

    await asyncio.gather(*map(one, range(len(samples))))


def timed_out(seconds: float) -> Outcome:
    """The outcome of a call that took longer than it may."""
    return Outcome("timeout", reason=f"did not answer within {seconds:g} s")


def canaries(function: Function) -> Sequence[Canary]:
    """Those that the function's module carries, as `CANARIES`, by the name of the function if it has several."""
    module, attribute = REWARDS.locate(function.name)
    found: Mapping[str, Sequence[Canary]] = getattr(importlib.import_module(module), "CANARIES", {})
    return found.get(attribute, ())


def die_with(parent: int) -> None:
    """The kernel kills this process when the thread that started it is gone, however it went; an end of file alone would not reach a busy one."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("whoever started this process is gone")


def limit_memory(more_bytes: int) -> int:
    """Lets this process take so much more than it has. Returns what it has."""
    now = address_space()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, hard))
    return now


def address_space() -> int:
    """Bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]))

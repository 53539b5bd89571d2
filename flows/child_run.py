"""A run in a process of its own, for those who need several: it can be stopped at a deadline, and what breaks it breaks nothing else."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks import record
from tasks.record import RunRecord

STOP_SECONDS = 120.0
"""A run that was told to stop has so long to write its records."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    status: Literal["finished", "failed", "stopped"]
    """`stopped`: at its deadline."""
    record: RunRecord | None
    """None where it ended before it had one."""
    reason: str | None
    """Of a failure, one line."""
    seconds: float


def run(
    overrides: Sequence[str],
    log: Path,
    *,
    seconds: float = math.inf,
    fresh: bool = True,
    until: str | None = None,
    program: Sequence[str] = ("-m", "flows.cli"),
) -> Outcome:
    """`almanac run` with these overrides. Whatever ends the caller, Ctrl-C and SIGTERM included, ends the run in order too.

    Args:
        overrides: in Hydra's grammar, the recipe included.
        log: what it says goes to the end of this file.
        seconds: after so many it is told to stop.
        fresh: `--fresh`.
        until: `--until`.
        program: Python's arguments for the command, where it is not the `almanac` of this code.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    started, stopped = time.monotonic(), False
    options = [*(["--fresh"] if fresh else []), *(["--until", until] if until else [])]
    command = [sys.executable, *program, "run", *options, *overrides]
    with log.open("ab") as output:
        begin = output.tell()
        # A session of its own: Ctrl-C reaches us alone, and the run is told once.
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True)
        try:
            child.wait(None if math.isinf(seconds) else seconds)
        except subprocess.TimeoutExpired:
            stopped = True
        finally:
            _stop(child)
    found = next((known for known in map(record.load, record.run_ids()[:3]) if known.process.pid == child.pid), None)
    took = time.monotonic() - started
    if child.returncode == 0:
        return Outcome("finished", found, None, took)
    if stopped:
        return Outcome("stopped", found, None, took)
    said = [line for line in log.read_bytes()[begin:].decode(errors="replace").splitlines() if line.strip()]
    reason = (found.error if found is not None else None) or next((line for line in said if line.startswith("almanac: ")), (said or ["no word"])[-1])
    return Outcome("failed", found, reason, took)


def _environment() -> dict[str, str]:
    """This process's own, without what a worker has said to it alone: which flow run it is."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT__")}


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Ends the run, in order if it does so in time."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

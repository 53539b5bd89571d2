"""Processes that belong together. `python -m flows.family` ends those that it is told of when whoever tells it is gone."""

import contextlib
import os
import sys
from collections.abc import Iterator

import psutil

STOP_SECONDS = 60.0
"""How long they may take to end in order."""


def family(session: int) -> list[psutil.Process]:
    """All processes of a session, though the one that began it may be dead, and all that they have started."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == session:
                found |= {member.pid: member for member in (process, *process.children(recursive=True))}
    return list(found.values())


def end(processes: list[psutil.Process], seconds: float) -> None:
    """Tells them to end, and ends those that have not after so many seconds."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(processes, timeout=seconds)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _sessions() -> Iterator[int]:
    for line in sys.stdin:
        yield int(line)


def main() -> None:
    """Takes sessions from its input, a line each, until that is closed."""
    end([member for session in list(_sessions()) for member in family(session)], STOP_SECONDS)


if __name__ == "__main__":
    main()

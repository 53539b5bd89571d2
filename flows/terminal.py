"""While a run is on, everything that libraries print goes to a file, and the terminal is left to one display."""

import ctypes
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TextIO

from rich.console import Console

PLAIN_WIDTH = 100
"""Columns where output goes to a file or a pipe, which have none of their own."""

_logs: list[TextIO] = []
"""Never closed: libraries that are imported meanwhile keep theirs as standard output for the rest of the process."""


@contextmanager
def captured(log_file: Path, descriptor: int = 1) -> Iterator[Console]:
    """Sends standard output and error to `log_file`, and gives a console that still writes to where `descriptor` (1 or 2) went before.

    Works on the file descriptors, so that C libraries and child processes are covered, and on Python's logging. Everything is put back
    at the end, also after an exception.

    Raises:
        OSError: the file cannot be opened; nothing is redirected then.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log = log_file.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    _logs.append(log)
    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _flush()
    # Duplicates are not inherited: a child process cannot reach the terminal even if it tries.
    saved = {number: os.dup(number) for number in (1, 2)}
    try:
        for number in saved:
            os.dup2(log.fileno(), number)
        logging.getLogger().addHandler(handler)
        # Python's own streams too: they would be buffered in blocks now, and tests or notebooks put others in their place.
        with redirect_stdout(log), redirect_stderr(log), os.fdopen(os.dup(saved[descriptor]), "w", encoding="utf-8") as terminal:
            yield Console(file=terminal, highlight=False, width=_width(terminal))
    finally:
        logging.getLogger().removeHandler(handler)
        _flush()
        for number, original in saved.items():
            os.dup2(original, number)
            os.close(original)


def silence_exit() -> None:
    """For a process that has nothing more to say: what libraries print while it ends goes to the newest log, where there is one.

    Prefect, for one, reports about its server from threads of its own until the very end.
    """
    for log in _logs[-1:]:
        _flush()
        for number in (1, 2):
            os.dup2(log.fileno(), number)


def plain_console() -> Console:
    """A console on standard output, for commands that print and end."""
    return Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH)


def _width(terminal: TextIO) -> int | None:
    """rich asks 0, 1 and 2 how wide the terminal is; 1 and 2 are files now, and 0 may be none. COLUMNS, where somebody set it, wins."""
    if "COLUMNS" in os.environ:
        return None
    if not terminal.isatty():
        return PLAIN_WIDTH
    # 0 where the terminal does not know.
    return None if os.isatty(0) else os.get_terminal_size(terminal.fileno()).columns or None


def _flush() -> None:
    """What was printed so far, by Python or through C's stdio, goes to where it was meant to go, if there is room for it."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)

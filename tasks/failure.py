"""Why something ended, in words that the record keeps and a person at the terminal reads."""

import errno
import shutil

from tasks import workspace

FULL_BYTES = 2**20
"""A disk with less than this is full: SQLite and Ray fail before the last byte is gone."""
NO_SPACE = "no space is left on the device that holds {root}; free some, or set another root with ALMANAC_ROOT"


def reason(error: BaseException) -> str:
    """What went wrong, and for a worker's error also in which worker; its traceback is for the log."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, SystemExit):
        return "terminated"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return NO_SPACE.format(root=workspace.root())
    text = str(error).strip()
    if isinstance(error, RuntimeError):
        from engine.control.deadline import WorkerError  # Imports Ray, which those who only list names need not wait for.

        if isinstance(error, WorkerError):
            # In between stands the worker's traceback.
            first, *rest = text.splitlines()
            return f"{first} {rest[-1].strip()}" if rest else first
    ours = type(error).__module__.partition(".")[0] in ("engine", "tasks", "flows")
    if text and (ours or isinstance(error, ValueError | OSError)):
        return text
    told = f"{type(error).__name__}: {text}" if text else type(error).__name__
    # Whatever a service says whose database cannot grow any more (Prefect's server: "500 Internal Server Error"), this is why.
    return f"{NO_SPACE.format(root=workspace.root())} ({told})" if _disk_is_full() else told


def _disk_is_full() -> bool:
    try:
        return shutil.disk_usage(workspace.root()).free < FULL_BYTES
    except OSError:
        return False

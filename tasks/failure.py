"""Why something ended, in words that the record keeps and a person at the terminal reads."""

import errno

from tasks import workspace


def reason(error: BaseException) -> str:
    """What went wrong, and for a worker's error also in which worker; its traceback is for the log."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, SystemExit):
        return "terminated"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return f"no space is left on the device that holds {workspace.root()}; free some, or set another root with ALMANAC_ROOT"
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
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

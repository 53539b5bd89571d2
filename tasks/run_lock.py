"""One run at a time under one root: two would share cores, data and ports, and each would spoil the other's numbers."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from tasks import workspace


class RunInProgressError(RuntimeError):
    """Another run is on; names it and its process."""


@contextmanager
def only_run(run: str, *, wait: bool = False) -> Iterator[None]:
    """Holds the lock while the block runs. The kernel lets go of it when the process dies, however it dies.

    Args:
        run: who holds it.
        wait: for as long as another process holds it.

    Raises:
        RunInProgressError: another process holds it, and nobody waits.
        OSError: the lock file cannot be written.
    """
    path = workspace.lock_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0, poll_interval=0.5)
    except Timeout as error:
        raise RunInProgressError(f"{_holder()}; wait until it ends, or stop it") from error
    try:
        path.write_text(json.dumps({"run": run, "pid": os.getpid()}))
        yield
    finally:
        lock.release()


def _holder() -> str:
    try:
        held = json.loads(workspace.lock_file().read_text())
        log = workspace.run_directory(held["run"]) / "almanac.log"
        return f"the run {held['run']} is on (process {held['pid']}, log {log})"
    except (ValueError, KeyError, TypeError):
        # It has just taken the lock and not yet said who it is.
        return f"another run is on (it holds {workspace.lock_file()})"

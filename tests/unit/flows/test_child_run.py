"""Runs in processes of their own; here the process is a few lines of Python that stand for `almanac`."""

import time
from pathlib import Path

import psutil
import pytest

from flows import child_run

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen(['sleep', '600'])
print('worker', worker.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    return tmp_path


def test_a_failure_carries_what_the_command_said(root: Path) -> None:
    """Mutation: the log's last line instead of the command's; or the part of the log that was there before."""
    log = root / "run.log"
    log.write_text("almanac: of another run\n")
    ended = child_run.run(["recipe=x"], log, program=("-c", "import sys; print('almanac: ' + sys.argv[-1]); print('log: there'); sys.exit(2)"))
    assert (ended.status, ended.record, ended.reason) == ("failed", None, "almanac: recipe=x")
    assert child_run.run([], log, program=("-c", "")).status == "finished"


def test_a_run_that_does_not_stop_is_ended_with_all_that_it_started(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: kill the process alone, not its group; or wait for it without a limit."""
    monkeypatch.setattr(child_run, "STOP_SECONDS", 0.5)
    ended = child_run.run([], root / "run.log", seconds=5.0, program=("-c", STUBBORN))
    assert ended.status == "stopped"
    worker = int((root / "run.log").read_text().split()[1])
    deadline = time.monotonic() + 30
    while running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(worker)


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

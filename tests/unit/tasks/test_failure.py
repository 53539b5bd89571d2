import errno
import shutil
from pathlib import Path

import pytest

from engine.control.deadline import WorkerError
from tasks.failure import NO_SPACE, reason
from tasks.problems import ConfigurationError, Problem

WORKER = "actor rank 0, update raised:\nray::actor()\n  File somewhere\nFloatingPointError: gradient norm is nan"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(143), "terminated"),
        # Mutation: printing the whole text buries both ends under a traceback.
        (WorkerError(WORKER), "actor rank 0, update raised: FloatingPointError: gradient norm is nan"),
        (WorkerError("no answer within 10 s from: actor rank 1, start"), "no answer within 10 s from: actor rank 1, start"),
        (ConfigurationError([Problem("seed", "is wrong"), Problem("name", "too")]), "seed: is wrong\nname: too"),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "[Errno 28] No space left on device: '/data/x'"),
        (RuntimeError("nobody answers"), "RuntimeError: nobody answers"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_reason(error: BaseException, text: str) -> None:
    assert reason(error) == text


def test_a_full_disk_without_a_file_is_named_by_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALMANAC_ROOT", "/somewhere")
    assert "/somewhere" in reason(OSError(errno.ENOSPC, "No space left on device"))


# Mutation: report a service's answer as it is; Prefect's server says no more than "500 Internal Server Error".
def test_a_service_that_fails_on_a_full_disk_is_not_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4096))
    assert reason(RuntimeError("500")) == f"{NO_SPACE.format(root=tmp_path)} (RuntimeError: 500)"
    # What we say ourselves names its own cause.
    assert reason(ConfigurationError([Problem("seed", "is wrong")])) == "seed: is wrong"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**30))
    assert reason(RuntimeError("500")) == "RuntimeError: 500"

import errno

import pytest

from engine.control.deadline import WorkerError
from tasks.config import ConfigurationError, Problem
from tasks.failure import reason

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

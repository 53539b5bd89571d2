"""Waiting for what other processes and threads do."""

import time
from collections.abc import Callable
from typing import Any

PAUSE = 0.3


def wait_for(what: str, condition: Callable[[], Any], seconds: float) -> Any:
    """What the condition says, once it says something; fails after so many seconds, with `what` in its message."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(PAUSE)
    raise AssertionError(f"{what}: not within {seconds:g} s")

"""Servers that were just started, and when they answer."""

import time
from collections.abc import Callable

PAUSE = 0.1
REQUEST_SECONDS = 5.0


def answers(url: str, seconds: float, check: Callable[[], None]) -> bool:
    """Asks a server of this machine until it answers well. Returns whether it has within so many seconds.

    Args:
        url: of a page that says whether it is healthy.
        seconds: after so many nobody waits any more.
        check: called before each question; raises where no answer will come, as when the process has ended.
    """
    import httpx  # not for commands that only show what is there

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        check()
        try:
            # No proxy: the server is on this machine.
            if httpx.get(url, timeout=REQUEST_SECONDS, trust_env=False).is_success:
                return True
        except httpx.HTTPError:
            pass
        time.sleep(PAUSE)
    return False

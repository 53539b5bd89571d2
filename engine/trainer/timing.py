"""Seconds by phase of one step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """`with timer("generate"): ...` adds to `metrics()["timing/generate_seconds"]`."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times the body as `phase`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def elapsed(self) -> float:
        """Seconds since the timer was made."""
        return time.perf_counter() - self._started

    def metrics(self) -> dict[str, float]:
        """Seconds of every phase, and of the whole step."""
        return {f"timing/{phase}_seconds": seconds for phase, seconds in self._seconds.items()} | {"timing/step_seconds": self.elapsed()}

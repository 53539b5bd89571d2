"""What a synchronisation cost one rank."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Ledger:
    """Bytes, seconds and memory of one rank and one synchronisation. The seconds are apart from each other, and `seconds` is all of them."""

    bytes_received: int = 0
    """Of weights, over the wire; with `changed_only` headers count, and it may be less than the minimum."""
    bytes_sent: int = 0
    bytes_minimum: int = 0
    """What the rank needs and does not hold."""
    bytes_proof: int = 0
    """Received of checksums."""
    peak_extra_bytes: int = 0
    """Largest size of the buckets and of what was put aside for the rollout's own packing, at one time."""
    bytes_kept: int = 0
    """Held from one synchronisation to the next: with `changed_only` copies of all that was sent and received."""
    transfer_seconds: float = 0.0
    """Filling buckets, and waiting for them."""
    load_seconds: float = 0.0
    """Copying into the rollout's storage."""
    pack_seconds: float = 0.0
    """The rollout's own form for its kernels."""
    proof_seconds: float = 0.0
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """By name."""
        return {name: float(value) for name, value in asdict(self).items()}


class Stopwatch:
    """Seconds of one phase, added up over all that is done `with` it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> "Stopwatch":
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started

    def waiting(self, items: Iterable[T]) -> Iterator[T]:
        """`items`, timed while the next one is waited for."""
        iterator, end = iter(items), object()
        while True:
            with self:
                item = next(iterator, end)
            if item is end:
                return
            yield item  # type: ignore[misc]  # not the end

"""What a synchronisation cost one rank."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, TypeVar

T = TypeVar("T")
PARTS = ("transfer", "load", "pack", "proof", "wait")
"""Of a ledger's seconds, in the order in which weights pass through them."""


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
    """Checksums and products."""
    wait_seconds: float = 0.0
    """For the ranks that are slower, at the end."""
    proof_coverage: float = 0.0
    """Share of the slices that were compared; 1 in the first synchronisation."""
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """By name."""
        return asdict(self)

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> Self:
        """The ledger that has these metrics; others may be among them."""
        return cls(**{field.name: metrics[field.name] for field in fields(cls)})

    def __add__(self, other: "Ledger") -> "Ledger":
        """Of several synchronisations, or ranks: sums, and the largest of the peaks."""
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return Ledger(**sums | {"peak_extra_bytes": max(self.peak_extra_bytes, other.peak_extra_bytes)})

    def by_part(self) -> dict[str, float]:
        """Seconds of each of `PARTS`."""
        return {part: getattr(self, f"{part}_seconds") for part in PARTS}


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

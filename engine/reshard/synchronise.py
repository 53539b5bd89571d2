"""Gives rollout engines the trainer's weights: layouts and a plan once, then transfer and proof each time."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from engine.reshard.held import Slices
from engine.reshard.layout import Layout
from engine.reshard.ledger import Ledger, Stopwatch
from engine.reshard.plan import Piece, kept_pieces, make_plan
from engine.reshard.proof import Coverage, Proof
from engine.reshard.transfer import Transfer

T = TypeVar("T")
Arrivals = Iterable[tuple[Piece, torch.Tensor]]
"""Slices with their values, each of which holds until the next is asked for."""


AIM = 0.5
"""Of the seconds that a proof may take. How long the next one takes is estimated from this one, and a busy machine takes longer for the same."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """How an engine took its weights."""

    pack_seconds: float = 0.0
    """Of bringing them into the form of its kernels."""
    staged_bytes: int = 0
    """Largest size, at one time, of what was put aside until a layer was complete."""


class Receiver(Protocol):
    """What a rollout engine is to a synchronisation."""

    weight_version: int | None
    """None while it has no complete set of weights."""

    def receive(self, arrivals: Arrivals, proof: Proof) -> Loaded:
        """Takes every slice, shows the proof where each landed and what was packed, and has the proof's version from then on."""
        ...


class Synchroniser:
    """One process's part in all synchronisations between a trainer and its rollout engines.

    Args:
        training: what each process holds, see `layout.training_layout` and `gathered`.
        rollout: what each process needs.
        bucket_bytes: largest size of what a process sends and receives in one round.
        max_proof_share: how much of a synchronisation's seconds the proof may take after the first one; None: always compare everything.
        process: this one, as the layouts number them: its rank in `group`.
        device: where buckets lie.
        group: all processes of both layouts; None: the default group.
        changed_only: send the elements that changed, where they are fewer bytes.

    Raises ValueError where the two sides do not fit each other; it is made before anything is sent.
    """

    def __init__(
        self,
        training: Layout,
        rollout: Layout,
        bucket_bytes: int,
        max_proof_share: float | None,
        process: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        changed_only: bool = False,
    ) -> None:
        self.plan = make_plan(training, rollout, bucket_bytes)
        self._tensors, self._process, self._device, self._group = rollout.tensors, process, device, group
        self._max_proof_share, self._coverage = max_proof_share, Coverage()
        self._kept = kept_pieces(training, rollout, process, bucket_bytes)
        self.transfer = Transfer(self.plan, self._kept, rollout.tensors, process, device, group, changed_only)

    def forget(self) -> None:
        """The next synchronisation sends everything, whatever was sent before."""
        self.transfer.forget()

    def run(self, shards: Slices, rollout: Receiver | None, version: int) -> Ledger:
        """Sends this process's shards, gives its engine what arrives, and proves it. A collective.

        Raises `ProofError` on every process where one of them has other weights than the trainer; the engine is then without a version.
        """
        started, transfer = time.perf_counter(), Stopwatch()
        proof = Proof(self._process, self._tensors, self.plan, self._kept, self._device, self._group, version, self._coverage)
        arrivals = transfer.waiting(self.transfer.run(shards, version))
        loaded = rollout.receive(arrivals, proof) if rollout else _nothing(arrivals)
        received = time.perf_counter() - started - proof.watch.seconds
        share = self._max_proof_share
        try:
            allowed = AIM * received * share / (1 - share) if share is not None else math.inf
            following = proof.check(shards, rollout.weight_version if rollout else None, allowed)
        except BaseException:
            self.forget()
            self._coverage = Coverage()  # The next one is looked at as the first one was.
            if rollout:
                rollout.weight_version = None
            raise
        covered, self._coverage = self._coverage.share, following
        return Ledger(
            bytes_received=self.transfer.bytes_received,
            bytes_sent=self.transfer.bytes_sent,
            bytes_minimum=self.plan.volumes[self._process].minimum,
            bytes_proof=proof.bytes,
            peak_extra_bytes=self.transfer.buffer_bytes + loaded.staged_bytes,
            bytes_kept=self.transfer.kept_bytes,
            transfer_seconds=transfer.seconds,
            load_seconds=received - transfer.seconds - loaded.pack_seconds,
            pack_seconds=loaded.pack_seconds,
            proof_seconds=proof.watch.seconds,
            wait_seconds=time.perf_counter() - started - received - proof.watch.seconds,
            proof_coverage=covered,
            seconds=time.perf_counter() - started,
        )


def _nothing(arrivals: Arrivals) -> Loaded:
    """Of a process without an engine: its part in the transfer is to send."""
    for piece, _ in arrivals:
        raise ValueError(f"{piece.tensor} was sent to a process that has no rollout engine")
    return Loaded()


def gathered(own: T | None, group: dist.ProcessGroup | None = None) -> dict[int, T]:
    """By process, what each has; None for one that has nothing to do with it. A collective."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return {process: one for process, one in enumerate(found) if one is not None}

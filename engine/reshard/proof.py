"""What shows, after every synchronisation, that the rollout computes with the trainer's weights.

Both sides take a checksum of every slice: the trainer of its shards, cast as they travel, apart from the buffers that carried them; the rollout
of the place from which it computes. Checksums go from the ranks that hold a slice to those that needed it, and the first tensor that differs is
named. What a kernel packs into a form of its own is looked at through the kernel itself (`packed_differs`).
"""

import functools
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from engine.reshard.held import Slices, taken
from engine.reshard.layout import Tensor
from engine.reshard.ledger import Stopwatch
from engine.reshard.plan import Piece, Plan
from engine.reshard.wire import posted

WORDS = 1 << 16
"""Words of 8 bytes that are weighted apart; longer data is a polynomial in sums of so many."""
MODULUS = 1 << 64
PROBE_COLUMNS = 4
"""Columns of a packed matrix that are compared exactly in each synchronisation."""
ROUNDING = 64.0
"""Errors of float32, relative to the largest output, that the sums of a packed matrix may be off."""
LEAST_SHARE = 1 / 64
"""Of the slices that are compared at least: each has its turn in so many synchronisations."""
ROWS = 1024
"""Of a matrix that are cast at once."""

_weights: dict[torch.device, torch.Tensor] = {}


class ProofError(RuntimeError):
    """The rollout does not compute with the trainer's weights."""


def checksum(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """64 bits, of the elements in row-major order, cast to `dtype`: sum of word i times an odd random number w_i, modulo 2^64.

    A change of any one word always shows, of several with probability 1 - 2^-63 or better for what is not made to deceive (multilinear hashing,
    Carter & Wegman 1979, section 3).
    """
    data, weights, total = tensor.detach(), _random_weights(tensor.device), tensor.numel()
    for part in _parts(data, WORDS * 8 // dtype.itemsize):
        flat = part.to(dtype).flatten()
        if flat.storage_offset() * dtype.itemsize % 8:  # words are read where they are aligned
            flat = flat.clone()
        flat = flat.view(torch.uint8)
        whole = flat.numel() // 8 * 8
        words = flat[:whole].view(torch.int64)
        if whole < flat.numel():
            rest = torch.zeros(8, dtype=torch.uint8, device=tensor.device)
            rest[: flat.numel() - whole] = flat[whole:]
            words = torch.cat([words, rest.view(torch.int64)])
        own = weights[: words.numel()]
        # Overflow is meant. CUDA has no integer dot product.
        value = torch.dot(words, own) if words.device.type == "cpu" else (words * own).sum()
        total = (total * 0x9E3779B97F4A7C15 + int(value)) % MODULUS
    return total - MODULUS if total >= MODULUS // 2 else total  # as an int64 holds it


def _parts(tensor: torch.Tensor, elements: int) -> Iterator[torch.Tensor]:
    """Whole rows, flat, of about so many elements together: small enough that a cast of them stays in the processor's cache."""
    if tensor.dim() < 2 or tensor[0].numel() > elements:
        yield from torch.split(tensor.contiguous().view(-1), elements)
        return
    for rows in torch.split(tensor, elements // tensor[0].numel()):
        yield rows.contiguous().view(-1)


def _random_weights(device: torch.device) -> torch.Tensor:
    if device not in _weights:
        drawn = torch.randint(-(1 << 62), 1 << 62, (WORDS,), dtype=torch.int64, generator=torch.Generator().manual_seed(0))
        _weights[device] = (2 * drawn + 1).to(device)
    return _weights[device]


def packed_differs(apply: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor, number: int) -> str | None:
    """How what a kernel computes differs from `weight` [out, in], of which it may hold a packed copy of its own; None where it does not.

    One input of ones and minus ones is compared within rounding; inputs with a single 1, which leave a column as it is, exactly. `number` chooses
    the columns, others each time.
    """
    columns = (torch.arange(PROBE_COLUMNS) * (weight.shape[1] // PROBE_COLUMNS + 1) + 31 * number) % weight.shape[1]
    signs = torch.randint(0, 2, (weight.shape[1],), generator=torch.Generator().manual_seed(number)) * 2 - 1
    inputs = torch.zeros(PROBE_COLUMNS + 1, weight.shape[1], dtype=weight.dtype, device=weight.device)
    inputs[0] = signs.to(inputs)
    inputs[torch.arange(PROBE_COLUMNS) + 1, columns] = 1
    found = apply(inputs)[:, : weight.shape[0]]
    if not torch.equal(found[1:], weight[:, columns.to(weight.device)].T):
        return "a column of it has other values"
    expected = torch.cat([rows.float() @ inputs[0].float() for rows in torch.split(weight, ROWS)])
    off = (found[0].float() - expected).abs()
    # Its own type rounds the result; before that, sums of float32 are formed in another order.
    bound = 4 * torch.finfo(weight.dtype).eps * expected.abs() + ROUNDING * torch.finfo(torch.float32).eps * expected.abs().max()
    return f"its product is off by {float(off.max()):.3g}" if not bool((off <= bound).all()) else None


@functools.cache
def _turn(what: Hashable) -> float:
    """From 0 to 1: when a slice is compared, in a round through all of them. Asked for in every synchronisation, of slices that stay the same."""
    return zlib.crc32(repr(what).encode()) / 2**32


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which slices one synchronisation compares: all of them, or as many as may be paid for, others each time until all had their turn."""

    start: float = 0.0
    share: float = 1.0

    def covers(self, what: Hashable) -> bool:
        """The same on every process."""
        return self.share >= 1 or (_turn(what) - self.start) % 1 < self.share

    def following(self, share: float) -> "Coverage":
        """That of the next synchronisation."""
        return Coverage((self.start + self.share) % 1, share)


@dataclass
class Proof:
    """Checksums of one process, for one synchronisation."""

    process: int
    tensors: Mapping[str, Tensor]
    plan: Plan
    kept: Sequence[Piece]
    device: torch.device
    group: dist.ProcessGroup | None
    version: int
    coverage: Coverage = field(default_factory=Coverage)
    found: dict[Piece, set[int | None]] = field(default_factory=dict)
    """Of what landed: more than one value where a slice landed in several places that differ; None where it is not compared."""
    bytes: int = 0
    """That this process received of it."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    """This process's own work, without waiting for others."""
    _packed: str = ""

    def landed(self, piece: Piece, tensor: torch.Tensor) -> None:
        """A slice where the rollout computes with it, or where it is packed from."""
        with self.watch:
            self.found.setdefault(piece, set()).add(self._checksum(piece, tensor) if self.coverage.covers(piece) else None)

    def packed(self, parameter: str, apply: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor) -> None:
        """A kernel that was given `weight` [out, in]."""
        with self.watch:
            if self._packed or not self.coverage.covers(parameter):
                return
            if differs := packed_differs(apply, weight, self.version):
                self._packed = f"its rollout engine computes with another {parameter} than it loaded ({differs}); the kernel was not packed again"

    def check(self, shards: Slices, found: int | None, allowed_seconds: float) -> Coverage:
        """Compares with the shards of all processes, and the version that this process's rollout engine has, if there is one. A collective.

        Every process raises where one of them has something to say: `ProofError`, naming the process and its first tensor that is wrong. Returns
        what the next synchronisation is to compare, so that its proof takes about as long as is allowed.
        """
        with self.watch:
            own: dict[Piece, int | None] = {}

            def held(piece: Piece) -> int | None:
                if piece not in own:  # It may go to several.
                    covered = self.coverage.covers(piece)
                    own[piece] = self._checksum(piece, taken(shards[piece.tensor], piece.box)) if covered else None
                return own[piece]

            outgoing: dict[int, list[int]] = {}
            incoming: dict[int, list[Piece]] = {}
            expected = {piece: held(piece) for piece in self.kept}
            for message in (message for messages in self.plan.rounds for message in messages):
                if message.source == self.process:
                    outgoing.setdefault(message.destination, []).extend(value for piece in message.pieces if (value := held(piece)) is not None)
                elif message.destination == self.process:
                    expected |= dict.fromkeys(message.pieces)
                    incoming.setdefault(message.source, []).extend(piece for piece in message.pieces if self.coverage.covers(piece))
        expected |= self._exchanged(outgoing, incoming)
        order = {name: number for number, name in enumerate(self.tensors)}
        wrong = [piece for piece, value in expected.items() if self.found.get(piece) != {value}]
        complaint = self._complaint(sorted(wrong, key=lambda piece: (order[piece.tensor], piece.box))) or self._packed
        if not complaint and found not in (None, self.version):
            complaint = f"its rollout engine has weight version {found}, the trainer {self.version}"
        everything = self.watch.seconds / self.coverage.share
        return self.coverage.following(self._agreed(complaint, min(1.0, max(LEAST_SHARE, allowed_seconds / max(everything, 1e-9)))))

    def _checksum(self, piece: Piece, tensor: torch.Tensor) -> int:
        return checksum(tensor, getattr(torch, self.tensors[piece.tensor].dtype))

    def _exchanged(self, outgoing: Mapping[int, Sequence[int]], incoming: Mapping[int, Sequence[Piece]]) -> dict[Piece, int]:
        sends = {to: torch.tensor(values, dtype=torch.int64, device=self.device) for to, values in outgoing.items()}
        receives = {source: torch.empty(len(pieces), dtype=torch.int64, device=self.device) for source, pieces in incoming.items()}
        for request in posted(sends.items(), receives.items(), self.group):
            request.wait()
        self.bytes = sum(tensor.nbytes for tensor in receives.values())
        return {piece: value for source, pieces in incoming.items() for piece, value in zip(pieces, receives[source].tolist(), strict=True)}

    def _complaint(self, wrong: Sequence[Piece]) -> str:
        if not wrong:
            return ""
        piece, others = wrong[0], len({other.tensor for other in wrong}) - 1
        ranges = ", ".join(f"{start}:{stop}" for start, stop in piece.box)
        if piece not in self.found:
            return f"{piece.tensor}[{ranges}] never arrived in its rollout engine"
        more = f", and {others} more tensors" if others else ""
        return f"its rollout engine computes with other values of {piece.tensor}[{ranges}] than the trainer{more}"

    def _agreed(self, complaint: str, share: float) -> float:
        """One error on all ranks, so that none waits for one that gave up; else the smallest share that any of them can pay for."""
        said = torch.tensor([float(bool(complaint)), -share], dtype=torch.float64, device=self.device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self.group)
        if not said[0]:
            return -float(said[1])
        complaints: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(complaints, complaint, group=self.group)
        process, text = next((process, text) for process, text in enumerate(complaints) if text)
        raise ProofError(f"rank {process}: {text}")

"""Sends what a plan says, and hands over what arrives: cast before the wire, in flat buckets, two rounds in flight, over gloo and NCCL alike."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from engine.reshard.held import Slices, taken
from engine.reshard.layout import Tensor, volume
from engine.reshard.plan import ITEM_BYTES, Message, Piece, Plan

IN_FLIGHT = 2
"""Rounds whose messages are under way: one is handed over while the next one travels."""

ALIGNMENT = 8
"""Bytes, of the widest type."""


@dataclass
class _Round:
    """A round's messages of this process, under way."""

    sends: list[tuple[Message, torch.Tensor]] = field(default_factory=list)
    receives: list[tuple[Message, torch.Tensor]] = field(default_factory=list)
    requests: list[dist.Work] = field(default_factory=list)


class Transfer:
    """One process's part of a plan; may be run again and again.

    Args:
        plan: the same on every process.
        kept: what this process holds itself of what it needs, in the order of `tensors`.
        tensors: with the types in which they travel.
        process: this one's number in the plan; numbers are ranks of `group`.
        device: where the buckets lie.
        group: all processes of the plan; None: the default group.
    """

    def __init__(
        self,
        plan: Plan,
        kept: Sequence[Piece],
        tensors: Mapping[str, Tensor],
        process: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._kept, self._tensors, self._process, self._device, self._group = kept, tensors, process, device, group
        self._order = {name: number for number, name in enumerate(tensors)}
        own = ([m for m in messages if process in (m.source, m.destination)] for messages in plan.rounds)
        self._rounds = [messages for messages in own if messages]
        self._bucket = max((sum(_aligned(message.bytes) for message in messages) for messages in self._rounds), default=0)

    @property
    def buffer_bytes(self) -> int:
        """Of the buckets while it runs."""
        return self._bucket * min(IN_FLIGHT, len(self._rounds))

    def run(self, shards: Slices) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Everything that this process needs, in about the order of the tensors; to be exhausted on every process of the plan.

        A tensor, shaped as its piece, holds until the next is asked for, in the type of the wire where it came over it, and of the shards where
        it was here already.
        """
        kept = deque(self._kept)
        for piece, tensor in self._arrivals(shards):
            # What is here already waits for its turn, so that layers are completed one after the other.
            while kept and self._order[kept[0].tensor] <= self._order[piece.tensor]:
                own = kept.popleft()
                yield own, taken(shards[own.tensor], own.box)
            yield piece, tensor
        for own in kept:
            yield own, taken(shards[own.tensor], own.box)

    def _arrivals(self, shards: Slices) -> Iterator[tuple[Piece, torch.Tensor]]:
        # Made once for all rounds: fresh memory costs more than the copy into it.
        free = deque(torch.empty(self._bucket, dtype=torch.uint8, device=self._device) for _ in range(min(IN_FLIGHT, len(self._rounds))))
        under_way: deque[tuple[_Round, torch.Tensor]] = deque()
        for messages in self._rounds:
            if not free:
                yield from self._completed(*under_way[0])
                free.append(under_way.popleft()[1])
            bucket = free.popleft()
            under_way.append((self._begin(messages, bucket, shards), bucket))
        for begun, bucket in under_way:
            yield from self._completed(begun, bucket)

    def _begin(self, messages: Iterable[Message], bucket: torch.Tensor, shards: Slices) -> _Round:
        begun, at, operations = _Round(), 0, []
        for message in messages:
            part = bucket[at : at + message.bytes]
            at += _aligned(message.bytes)
            if message.source == self._process:
                for piece, view in self._cut(message, part):
                    view.copy_(taken(shards[piece.tensor], piece.box))
                begun.sends.append((message, part))
                operations.append(dist.P2POp(dist.isend, part, group=self._group, group_peer=message.destination))
            else:
                begun.receives.append((message, part))
                operations.append(dist.P2POp(dist.irecv, part, group=self._group, group_peer=message.source))
        begun.requests = dist.batch_isend_irecv(operations)
        return begun

    def _completed(self, begun: _Round, bucket: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        for request in begun.requests:
            request.wait()
        arrived = [cut for message, part in begun.receives for cut in self._cut(message, part)]
        yield from sorted(arrived, key=lambda found: self._order[found[0].tensor])

    def _cut(self, message: Message, part: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Views of a message's pieces."""
        at = 0
        for piece in message.pieces:
            dtype = self._tensors[piece.tensor].dtype
            size = volume(piece.box) * ITEM_BYTES[dtype]
            yield piece, part[at : at + size].view(getattr(torch, dtype)).view([stop - start for start, stop in piece.box])
            at += size


def _aligned(size: int) -> int:
    """Where the next message may begin, whatever the type of its first piece."""
    return -(-size // ALIGNMENT) * ALIGNMENT

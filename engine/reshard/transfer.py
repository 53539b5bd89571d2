"""Sends what a plan says, and hands over what arrives: cast before the wire, in flat buckets, two rounds in flight, over gloo and NCCL alike."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from engine.reshard.held import Slices, taken
from engine.reshard.layout import Tensor, sizes, volume
from engine.reshard.plan import ITEM_BYTES, Message, Piece, Plan
from engine.reshard.wire import Changed, Part, Whole, posted

IN_FLIGHT = 2
"""Rounds whose messages are under way: one is handed over while the next one travels."""

ALIGNMENT = 8
"""Bytes, of the widest type."""


@dataclass
class _Round:
    """A round's messages of this process, under way."""

    sends: list[Part] = field(default_factory=list)
    receives: list[Part] = field(default_factory=list)
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
        changed_only: send what changed since the last run where that is less, see `wire.Changed`.
    """

    bytes_received = 0
    """Over the wire, in the last run."""
    bytes_sent = 0

    def __init__(
        self,
        plan: Plan,
        kept: Sequence[Piece],
        tensors: Mapping[str, Tensor],
        process: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        changed_only: bool = False,
    ) -> None:
        self._kept, self._tensors, self._process, self._device, self._group = kept, tensors, process, device, group
        self._form = Changed(tensors, process, device, group) if changed_only else Whole()
        self._order = {name: number for number, name in enumerate(tensors)}
        own = ([m for m in messages if process in (m.source, m.destination)] for messages in plan.rounds)
        self._rounds = [messages for messages in own if messages]
        self._bucket = max((sum(_aligned(message.bytes) for message in messages) for messages in self._rounds), default=0)

    @property
    def buffer_bytes(self) -> int:
        """Of the buckets while it runs, and of what was used beside them."""
        return self._bucket * min(IN_FLIGHT, len(self._rounds)) + self._form.extra_bytes

    @property
    def kept_bytes(self) -> int:
        """Held from one run to the next."""
        return self._form.kept_bytes

    def forget(self) -> None:
        """The next run sends everything."""
        self._form.forget()

    def run(self, shards: Slices, version: int) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Everything that this process needs, in about the order of the tensors; to be exhausted on every process of the plan.

        A tensor, shaped as its piece, holds until the next is asked for, in the type of the wire where it came over it, and of the shards where
        it was here already.
        """
        kept = deque(self._kept)
        self._form.start()
        self.bytes_received = self.bytes_sent = 0
        for piece, tensor in self._arrivals(shards):
            # What is here already waits for its turn, so that layers are completed one after the other.
            while kept and self._order[kept[0].tensor] <= self._order[piece.tensor]:
                own = kept.popleft()
                yield own, taken(shards[own.tensor], own.box)
            yield piece, tensor
        for own in kept:
            yield own, taken(shards[own.tensor], own.box)
        self.bytes_received += self._form.header_bytes
        self._form.finish(version)

    def _arrivals(self, shards: Slices) -> Iterator[tuple[Piece, torch.Tensor]]:
        # Made once for all rounds: fresh memory costs more than the copy into it.
        free = deque(torch.empty(self._bucket, dtype=torch.uint8, device=self._device) for _ in range(min(IN_FLIGHT, len(self._rounds))))
        under_way: deque[tuple[_Round, torch.Tensor]] = deque()
        for messages in self._rounds:
            if not free:
                begun, bucket = under_way.popleft()
                yield from self._completed(begun)
                free.append(bucket)
            bucket = free.popleft()
            under_way.append((self._begin(messages, bucket, shards), bucket))
        for begun, _ in under_way:
            yield from self._completed(begun)

    def _begin(self, messages: Iterable[Message], bucket: torch.Tensor, shards: Slices) -> _Round:
        begun, at, room = _Round(), 0, list[Part]()
        for message in messages:
            part = bucket[at : at + message.bytes]
            at += _aligned(message.bytes)
            if message.source == self._process:
                for piece, view in self._cut(message, part):
                    view.copy_(taken(shards[piece.tensor], piece.box))
                begun.sends.append((message, self._form.outgoing(message, part)))
            else:
                room.append((message, part))
        begun.receives = self._form.incoming(begun.sends, room)
        self.bytes_sent += sum(part.nbytes for _, part in begun.sends)
        self.bytes_received += sum(part.nbytes for _, part in begun.receives)
        sends, receives = [(message.destination, part) for message, part in begun.sends], [(message.source, part) for message, part in begun.receives]
        begun.requests = posted(sends, receives, self._group)
        return begun

    def _completed(self, begun: _Round) -> Iterator[tuple[Piece, torch.Tensor]]:
        for request in begun.requests:
            request.wait()
        arrived = [cut for message, part in begun.receives for cut in self._cut(message, self._form.arrived(message, part))]
        yield from sorted(arrived, key=lambda found: self._order[found[0].tensor])

    def _cut(self, message: Message, part: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Views of a message's pieces."""
        at = 0
        for piece in message.pieces:
            dtype = self._tensors[piece.tensor].dtype
            size = volume(piece.box) * ITEM_BYTES[dtype]
            yield piece, part[at : at + size].view(getattr(torch, dtype)).view(sizes(piece.box))
            at += size


def _aligned(size: int) -> int:
    """Where the next message may begin, whatever the type of its first piece."""
    return -(-size // ALIGNMENT) * ALIGNMENT

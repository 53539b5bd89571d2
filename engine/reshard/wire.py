"""What goes over the wire for a message: all of it, or only what has changed since it was last sent.

`Transfer` chooses one of the two and keeps to it.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from engine.reshard.layout import Tensor
from engine.reshard.plan import ITEM_BYTES, Message

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes. As such elements are compared: a NaN equals itself, and zero differs from minus zero."""
BLOCK = 255
"""Words that are counted together: a position in them, and how many of them changed, take one byte each."""
BLOCKS_AT_ONCE = 1 << 13
"""Blocks whose positions are found at a time: some tens of megabytes of 64-bit numbers, whatever the size of a message."""
NO_VERSION = -1

Part = tuple[Message, torch.Tensor]
"""A message, and bytes of it."""


class Whole:
    """Every message as it is."""

    kept_bytes = 0
    """Held from one synchronisation to the next."""
    extra_bytes = 0
    """Largest size of what was used beside the buckets, at one time."""
    header_bytes = 0
    """That this process received beside the messages, since `start`."""

    def start(self) -> None:
        """Before the first message of a synchronisation. A collective."""

    def outgoing(self, message: Message, values: torch.Tensor) -> torch.Tensor:
        """What to send for a message. `values` are its bytes, and may be overwritten."""
        return values

    def incoming(self, sends: Sequence[Part], receives: Sequence[Part]) -> list[Part]:
        """Where to receive what comes, for one round: `sends` is what goes out in it, `receives` has room for the whole of each message."""
        return list(receives)

    def arrived(self, message: Message, received: torch.Tensor) -> torch.Tensor:
        """The message's bytes."""
        return received

    def finish(self, version: int) -> None:
        """After the last message."""

    def forget(self) -> None:
        """Nothing that was sent or received counts as known."""


class Changed(Whole):
    """The elements that changed, where they are fewer bytes than the message. Both of its ends keep a copy of it, which the receiver patches.

    A pair whose ends do not have copies of the same version sends whole messages: at first, and after anything that went wrong.

    Args:
        tensors: with the types in which they travel.
        process: this one, a rank of `group`.
        device: where the copies lie.
    """

    def __init__(self, tensors: Mapping[str, Tensor], process: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._tensors, self._process, self._device, self._group = tensors, process, device, group
        self._copies: dict[Message, torch.Tensor] = {}
        self._version = NO_VERSION
        self._same: list[bool] = []

    def start(self) -> None:
        """See `Whole`. Every process tells of which version its copies are."""
        own = torch.tensor([self._version], device=self._device)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(found, own, group=self._group)
        self._same = [self._version != NO_VERSION and int(other) == self._version for other in found]
        self._version = NO_VERSION  # Until the end, copies are of two versions.
        self.extra_bytes, self.header_bytes = 0, (len(found) - 1) * own.nbytes

    def outgoing(self, message: Message, values: torch.Tensor) -> torch.Tensor:
        """See `Whole`."""
        copy, word = self._copy(message), self._word(message)
        found = changes(values.view(word), copy.view(word)) if self._same[message.destination] else None
        copy.copy_(values)
        if not found:
            return values if found is None else values[:0]
        size = sum(part.nbytes for part in found)
        self.extra_bytes = max(self.extra_bytes, size)
        return torch.cat([part.view(torch.uint8) for part in found], out=values[:size])

    def incoming(self, sends: Sequence[Part], receives: Sequence[Part]) -> list[Part]:
        """See `Whole`. Sizes come first; a whole message goes straight into its copy."""
        told = [(message.destination, torch.tensor([part.nbytes], device=self._device)) for message, part in sends]
        sizes = [(message.source, torch.empty(1, dtype=torch.int64, device=self._device)) for message, _ in receives]
        for request in posted(told, sizes, self._group):
            request.wait()
        self.header_bytes += sum(size.nbytes for _, size in sizes)
        return [
            (message, room[: int(size)] if int(size) < message.bytes else self._copy(message))
            for (message, room), (_, size) in zip(receives, sizes, strict=True)
        ]

    def arrived(self, message: Message, received: torch.Tensor) -> torch.Tensor:
        """See `Whole`."""
        copy = self._copies[message]
        if received.nbytes < message.bytes:
            patch(copy.view(self._word(message)), received)
        return copy

    def finish(self, version: int) -> None:
        """See `Whole`."""
        self._version = version

    def forget(self) -> None:
        """See `Whole`."""
        self._copies.clear()
        self._version, self.kept_bytes = NO_VERSION, 0

    def _copy(self, message: Message) -> torch.Tensor:
        if message not in self._copies:
            self._copies[message] = torch.empty(message.bytes, dtype=torch.uint8, device=self._device)
            self.kept_bytes += message.bytes
        return self._copies[message]

    def _word(self, message: Message) -> torch.dtype:
        """Of its narrowest elements, which come last; a wider one is several words."""
        return WORDS[ITEM_BYTES[self._tensors[message.pieces[-1].tensor].dtype]]


def changes(now: torch.Tensor, before: torch.Tensor) -> list[torch.Tensor] | None:
    """The words [n] of `now` that differ from `before`; None where what follows would not be smaller than `now`; nothing where none does.

    Returns their values, then by block how many they are (uint8), then the position of each in its block (uint8).
    """
    values, counts, positions = [], [], []
    changed, blocks, step = 0, -(-now.numel() // BLOCK), BLOCK * BLOCKS_AT_ONCE
    for new, old in zip(torch.split(now, step), torch.split(before, step), strict=True):
        found = (new != old).nonzero().squeeze(1)
        changed += found.numel()
        if changed and blocks + changed * (1 + now.element_size()) >= now.nbytes:
            return None
        values.append(new[found])
        counts.append(torch.bincount(found // BLOCK, minlength=-(-new.numel() // BLOCK)).to(torch.uint8))
        positions.append((found % BLOCK).to(torch.uint8))
    return [*values, *counts, *positions] if changed else []


def patch(words: torch.Tensor, payload: torch.Tensor) -> None:
    """Writes what `changes` found, as bytes, into the words [n] from which it was found."""
    if not payload.numel():
        return
    blocks, width = -(-words.numel() // BLOCK), words.element_size()
    changed = (payload.numel() - blocks) // (1 + width)
    values, counts, positions = torch.split(payload, [changed * width, blocks, changed])
    at = 0
    for part, own in zip(torch.split(words, BLOCK * BLOCKS_AT_ONCE), torch.split(counts, BLOCKS_AT_ONCE), strict=True):
        block = torch.repeat_interleave(own.long())
        here = slice(at, at + block.numel())
        part[block * BLOCK + positions[here]] = values.view(words.dtype)[here]
        at = here.stop


def posted(
    sends: Iterable[tuple[int, torch.Tensor]], receives: Iterable[tuple[int, torch.Tensor]], group: dist.ProcessGroup | None
) -> list[dist.Work]:
    """Sends to and receives from ranks of `group`, under way. Tensors without elements do not travel."""
    operations = [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in sends if tensor.numel()]
    operations += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in receives if tensor.numel()]
    return dist.batch_isend_irecv(operations) if operations else []

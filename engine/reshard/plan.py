"""Who sends what to whom, so that each rollout rank receives exactly what it needs and does not hold.

Pure arithmetic, made once, good for every synchronisation while the layouts stay as they are.

The volumes and the bound that they are compared with follow HybridFlow (Sheng et al. 2024, arXiv:2409.19256, section 5.3), for FSDP shards:
a process with 1/N of the model that needs 1/t of it cannot receive less than M/t - M/N bytes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from engine.reshard.layout import Box, Layout, intersection, volume, without

ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
SPLIT = 4
"""A slice that fills more than this part of a bucket is divided, so that buckets fill well and any slice fits."""
FULL_GATHER_BYTES = 4
"""Of one element in float32, which trainers keep and the usual loop gathers."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a checkpoint tensor on its way from one process to another."""

    tensor: str
    box: Box


@dataclass(frozen=True, slots=True)
class Message:
    """Pieces that lie one after the other in one flat buffer, each in row-major order, in the rollout's dtype; wider types first, so that all are
    aligned."""

    source: int
    destination: int
    pieces: tuple[Piece, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Volumes:
    """What one process has to do with, in bytes of the rollout's dtype where nothing else is said."""

    needed: int
    """What its rollout rank computes with; 0 for a process that only trains."""
    held: int
    """Its training shards; 0 for a process that only generates."""
    minimum: int
    """The part of `needed` that it does not hold: less cannot be received with these layouts."""
    bound: int
    """What would be left to receive if all that it holds were of what it needs: less cannot be received by any order of shards of this size."""
    received: int
    sent: int
    full_gather: int
    """What it would receive if every tensor were gathered whole in float32; 0 for a process that does not train."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Messages by round. In a round a process sends and receives at most `bucket_bytes` together: with two rounds in flight, twice that.

    Rounds follow the order of the tensors, so that a layer is complete soon after it was begun.
    """

    rounds: tuple[tuple[Message, ...], ...]
    volumes: Mapping[int, Volumes]
    """By process."""
    bucket_bytes: int
    largest_slice: int
    """Bytes of the largest piece before it was divided."""

    @property
    def peak_buffer(self) -> int:
        """Largest bytes of buffers that a process has with two consecutive rounds in flight."""
        loads = [_loads(messages) for messages in self.rounds] + [{}]
        return max((first[process] + second.get(process, 0) for first, second in pairwise(loads) for process in first), default=0)

    @property
    def messages(self) -> int:
        """Sends of one synchronisation: buckets, each of which goes from one process to one other."""
        return sum(len(messages) for messages in self.rounds)

    @property
    def pieces(self) -> int:
        """Slices that travel in them."""
        return sum(len(message.pieces) for messages in self.rounds for message in messages)


def make_plan(training: Layout, rollout: Layout, bucket_bytes: int) -> Plan:
    """What goes from processes that hold to processes that need. A process in both layouts is colocated: it keeps what it has.

    Among processes that hold the same, the one that has sent least so far is asked.

    Raises:
        ValueError: the two sides disagree about the names or shapes of tensors, nobody holds something that is needed, or no element fits
            into a bucket.
    """
    _check_same(training, rollout)
    if bucket_bytes < SPLIT * max(ITEM_BYTES[tensor.dtype] for tensor in rollout.tensors.values()):
        raise ValueError(f"bucket_bytes={bucket_bytes} is too small for a single element; choose more, 100 to 500 MB are usual")
    sent: dict[int, int] = defaultdict(int)
    pieces: list[tuple[int, int, Piece, int]] = []
    largest = 0
    for name, tensor in rollout.tensors.items():
        item = ITEM_BYTES[tensor.dtype]
        holders: dict[Box, list[int]] = {}
        for process, held in training.boxes.items():
            for box in held.get(name, ()):
                holders.setdefault(box, []).append(process)
        for destination, needed in rollout.boxes.items():
            for sources, slice_ in _sources(name, needed.get(name, ()), training.boxes.get(destination, {}).get(name, ()), holders):
                largest = max(largest, volume(slice_) * item)
                for box in divided(slice_, bucket_bytes // (SPLIT * item)):
                    source = min(sources, key=lambda process: (sent[process], process))
                    sent[source] += volume(box) * item
                    pieces.append((source, destination, Piece(name, box), volume(box) * item))
    rounds = _rounds(pieces, {name: ITEM_BYTES[tensor.dtype] for name, tensor in rollout.tensors.items()}, bucket_bytes)
    return Plan(rounds=rounds, volumes=_volumes(training, rollout, rounds), bucket_bytes=bucket_bytes, largest_slice=largest)


def kept_pieces(training: Layout, rollout: Layout, process: int, bucket_bytes: int) -> list[Piece]:
    """What a process needs and holds itself, in the order of the tensors, divided as what travels."""
    needs, holds = rollout.boxes.get(process, {}), training.boxes.get(process, {})
    return [
        Piece(name, box)
        for name, tensor in rollout.tensors.items()
        for needed in needs.get(name, ())
        for held in holds.get(name, ())
        if (shared := intersection(needed, held))
        for box in divided(shared, bucket_bytes // (SPLIT * ITEM_BYTES[tensor.dtype]))
    ]


def divided(box: Box, elements: int) -> Iterator[Box]:
    """`box` in boxes of at most so many elements, cut along its first dimensions."""
    dimension = next((d for d, (start, stop) in enumerate(box) if stop - start > 1), None)
    if volume(box) <= elements or dimension is None:
        yield box
        return
    start, stop = box[dimension]
    rows = max(1, elements // (volume(box) // (stop - start)))
    for low in range(start, stop, rows):
        yield from divided((*box[:dimension], (low, min(low + rows, stop)), *box[dimension + 1 :]), elements)


def _check_same(training: Layout, rollout: Layout) -> None:
    lacking, excess = rollout.tensors.keys() - training.tensors.keys(), training.tensors.keys() - rollout.tensors.keys()
    if lacking or excess:
        raise ValueError(
            f"trainer and rollout do not hold the same tensors: the trainer lacks {sorted(lacking)[:5]}, the rollout {sorted(excess)[:5]}"
        )
    for name, tensor in rollout.tensors.items():
        if tensor.shape != training.tensors[name].shape:
            raise ValueError(f"{name}: the trainer's shape is {training.tensors[name].shape}, the rollout's {tensor.shape}")


def _sources(name: str, needed: Iterable[Box], own: Iterable[Box], holders: Mapping[Box, list[int]]) -> Iterator[tuple[list[int], Box]]:
    """What is missing, in boxes, each with the processes that can send it."""
    missing = without(needed, own)
    for held, processes in holders.items():
        if not missing:
            return
        yield from ((processes, shared) for box in missing if (shared := intersection(box, held)))
        missing = without(missing, [held])
    if missing:
        raise ValueError(f"{name}: no training rank holds {missing[0]}, which a rollout rank needs")


def _rounds(pieces: Iterable[tuple[int, int, Piece, int]], items: Mapping[str, int], bucket_bytes: int) -> tuple[tuple[Message, ...], ...]:
    """In order: a round ends with the first piece for which one of its two ends has no more room."""
    rounds: list[dict[tuple[int, int], list[Piece]]] = []
    load: dict[int, int] = {}
    for source, destination, piece, size in pieces:
        if not rounds or max(load.get(source, 0), load.get(destination, 0)) + size > bucket_bytes:
            rounds.append({})
            load = {}
        for end in (source, destination):
            load[end] = load.get(end, 0) + size
        rounds[-1].setdefault((source, destination), []).append(piece)
    return tuple(tuple(_message(*pair, inside, items) for pair, inside in sorted(round_.items())) for round_ in rounds)


def _message(source: int, destination: int, pieces: Iterable[Piece], items: Mapping[str, int]) -> Message:
    ordered = tuple(sorted(pieces, key=lambda piece: -items[piece.tensor]))
    return Message(source, destination, ordered, sum(volume(piece.box) * items[piece.tensor] for piece in ordered))


def _loads(messages: Iterable[Message]) -> dict[int, int]:
    loads: dict[int, int] = defaultdict(int)
    for message in messages:
        loads[message.source] += message.bytes
        loads[message.destination] += message.bytes
    return loads


def _volumes(training: Layout, rollout: Layout, rounds: Iterable[Iterable[Message]]) -> dict[int, Volumes]:
    received: dict[int, int] = defaultdict(int)
    sent: dict[int, int] = defaultdict(int)
    for messages in rounds:
        for message in messages:
            received[message.destination] += message.bytes
            sent[message.source] += message.bytes
    elements = sum(tensor.elements for tensor in rollout.tensors.values())
    items = {name: ITEM_BYTES[tensor.dtype] for name, tensor in rollout.tensors.items()}
    volumes: dict[int, Volumes] = {}
    for process in sorted(training.boxes.keys() | rollout.boxes.keys()):
        needs, holds = rollout.boxes.get(process, {}), training.boxes.get(process, {})
        needed = sum(items[name] * volume(box) for name, boxes in needs.items() for box in boxes)
        held = sum(items[name] * volume(box) for name, boxes in holds.items() for box in boxes)
        both = sum(
            items[name] * volume(shared)
            for name, boxes in needs.items()
            for box in boxes
            for other in holds.get(name, ())
            if (shared := intersection(box, other))
        )
        gathered = elements - sum(volume(box) for boxes in holds.values() for box in boxes) if process in training.boxes else 0
        volumes[process] = Volumes(
            needed=needed,
            held=held,
            minimum=needed - both,
            bound=max(0, needed - held),
            received=received[process],
            sent=sent[process],
            full_gather=gathered * FULL_GATHER_BYTES,
        )
    return volumes

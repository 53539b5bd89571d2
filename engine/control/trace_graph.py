"""Where the boxes and lines of a recorded dataflow go: layered from left to right by dependency (Sugiyama, Tagawa and Toda 1981).

Calls of one operator in one layer share a box, so that a hundred streamed calls are one box, "× 100". Lines that pass a layer get a slot of their
own there, so no line crosses a box; every line comes in at a height of its own, and that is where its label stands, so no two labels meet.
All lengths are in pixels, y points down.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

from engine.control.trace import Edge, Operation, Trace

GAP = 14
"""Between two boxes of a layer."""
PORT = 18
"""Between two lines that come into a box: the height of a label, and a little."""
BEND = 46
"""Where lines change their height, between two layers."""
LABEL = 64
"""Where they are level, in front of a box: the width of a label."""
CHARACTER = 8.7
"""Mean width in the boxes' larger font."""
MARGIN = 6


@dataclass(frozen=True, slots=True)
class Box:
    """Calls of one operator, `role.operator`; (x, y) is the upper left corner."""

    name: str
    layer: int
    operations: list[Operation]
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Line:
    """All edges from one box to another, or none: the target is then only held back by the state that the source left behind."""

    source: int
    target: int
    edges: list[Edge]
    points: list[tuple[float, float]]
    """The right side of the source, then (start, end) of each level piece."""

    @property
    def bytes(self) -> int:
        """Of all edges."""
        return sum(edge.bytes for edge in self.edges)


@dataclass(frozen=True, slots=True)
class Graph:
    """A drawing. `Line.source` and `Line.target` are positions in `boxes`."""

    boxes: list[Box]
    lines: list[Line]
    width: float
    height: float


@dataclass(slots=True, eq=False)
class _Slot:
    """A place in a layer, of a box or of a line that passes; `y` is its middle."""

    height: float
    y: float = 0.0
    before: list["_Slot"] = field(default_factory=list)
    after: list["_Slot"] = field(default_factory=list)


def layout(trace: Trace) -> Graph:
    """The same trace always gives the same drawing."""
    depth, waits = _depths(trace)
    found: dict[tuple[int, str], list[Operation]] = defaultdict(list)
    for operation in sorted(trace.operations, key=lambda one: one.id):
        found[depth[operation.id], operation.name].append(operation)
    keys = sorted(found, key=lambda key: (key[0], found[key][0].id))
    box_of = {operation.id: number for number, key in enumerate(keys) for operation in found[key]}
    edges: dict[tuple[int, int], list[Edge]] = defaultdict(list)
    for edge in trace.edges:
        edges[box_of[edge.source], box_of[edge.target]].append(edge)
    for source, target in waits:
        edges.setdefault((box_of[source], box_of[target]), [])

    slots = [_Slot(height=0) for _ in keys]
    layers: list[list[_Slot]] = [[] for _ in range(1 + max(depth.values(), default=-1))]
    for (layer, _), slot in zip(keys, slots, strict=True):
        layers[layer].append(slot)
    chains = {pair: _chain(slots, keys, layers, *pair) for pair in sorted(edges)}
    for slot in slots:
        slot.height = max(62, PORT * len(slot.before) + 8, 9 * len(slot.after) + 8)
    _arrange(layers)

    longest = max((len(part) for operation in trace.operations for part in (operation.role, operation.operator)), default=0)
    width = min(200, max(122, CHARACTER * longest + 20))
    stride = width + BEND + LABEL
    top = min((slot.y - slot.height / 2 for layer in layers for slot in layer), default=0) - MARGIN
    boxes = [
        Box(name, layer, found[layer, name], MARGIN + layer * stride, slot.y - slot.height / 2 - top, width, slot.height)
        for (layer, name), slot in zip(keys, slots, strict=True)
    ]
    lines = [Line(*pair, edges[pair], _points(chain, boxes[pair[0]], top, stride)) for pair, chain in chains.items()]
    bottom = max((slot.y + slot.height / 2 for layer in layers for slot in layer), default=0)
    return Graph(boxes, lines, max(0, len(layers) * stride - BEND - LABEL) + 2 * MARGIN, bottom - top + MARGIN)


def _depths(trace: Trace) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """The longest way to each operation, and (source, target) of operations that no edge leads to but that a role could only run after another.

    Those read what the role left in its own memory: `actor.synchronise` takes no argument but the weights that `actor.update` made.
    """
    sources: dict[int, list[int]] = defaultdict(list)
    for edge in trace.edges:
        sources[edge.target].append(edge.source)
    depth: dict[int, int] = {}
    waits = []
    latest: dict[str, dict[str, Operation]] = defaultdict(dict)
    for operation in sorted(trace.operations, key=lambda one: one.id):
        if not sources[operation.id] and operation.spans:
            started = min(span.started for span in operation.spans)
            done = [(_ended(one), one.id) for name, one in latest[operation.role].items() if name != operation.operator and _ended(one) <= started]
            if done:
                sources[operation.id] = [max(done)[1]]
                waits.append((max(done)[1], operation.id))
        depth[operation.id] = 1 + max((depth[source] for source in sources[operation.id]), default=-1)
        if operation.spans:
            latest[operation.role][operation.operator] = operation
    return depth, waits


def _ended(operation: Operation) -> float:
    return max(span.ended for span in operation.spans)


def _chain(slots: list[_Slot], keys: list[tuple[int, str]], layers: list[list[_Slot]], source: int, target: int) -> list[_Slot]:
    """From box to box, with a slot in every layer between them."""
    passes = [_Slot(height=PORT) for _ in range(keys[source][0] + 1, keys[target][0])]
    for layer, slot in enumerate(passes, start=keys[source][0] + 1):
        layers[layer].append(slot)
    chain = [slots[source], *passes, slots[target]]
    for one, next_ in itertools.pairwise(chain):
        one.after.append(next_)
        next_.before.append(one)
    return chain


def _arrange(layers: list[list[_Slot]]) -> None:
    """Orders each layer so that few lines cross, and then gives every slot its height.

    Sweeps of barycentres find the order, and neighbours change places where that takes crossings away. As for the heights: each slot wants to be
    where those are that it is connected with. Those that are connected with none come below the others.
    """
    alone = [[slot for slot in layer if not slot.before and not slot.after] for layer in layers]
    layers = [[slot for slot in layer if slot.before or slot.after] for layer in layers]
    for layer in layers:
        _place(layer, [0.0] * len(layer))
    for sweep in range(24):
        forward = sweep % 2 == 0
        for layer in layers if forward else reversed(layers):
            wanted = {id(slot): _mean(slot, slot.before if forward else slot.after) for slot in layer}
            if sweep < 16:
                layer.sort(key=lambda slot: wanted[id(slot)])
                _untangle(layer)
            _place(layer, [wanted[id(slot)] for slot in layer])
    for layer in layers:  # at last with an eye on both sides
        _place(layer, [_mean(slot, slot.before + slot.after) for slot in layer])
    for layer, lonely in zip(layers, alone, strict=True):
        below = layer[-1].y + layer[-1].height / 2 + GAP if layer else 0.0
        for slot in lonely:
            slot.y = below + slot.height / 2
            below += slot.height + GAP


def _mean(slot: _Slot, neighbours: list[_Slot]) -> float:
    return sum(one.y for one in neighbours) / len(neighbours) if neighbours else slot.y


def _untangle(layer: list[_Slot]) -> None:
    for number in range(len(layer) - 1):
        upper, lower = layer[number : number + 2]
        if _crossings(lower, upper) < _crossings(upper, lower):
            layer[number : number + 2] = lower, upper


def _crossings(upper: _Slot, lower: _Slot) -> int:
    sides = ((upper.before, lower.before), (upper.after, lower.after))
    return sum(one.y > other.y for ones, others in sides for one in ones for other in others)


def _place(layer: list[_Slot], wanted: list[float]) -> None:
    """Pushing down whatever is too close from the top, and up from the bottom, are two answers that keep order and gaps, and so is their mean."""
    apart = [(one.height + other.height) / 2 + GAP for one, other in itertools.pairwise(layer)]
    down, up = list(wanted), list(wanted)
    for number, distance in enumerate(apart):
        down[number + 1] = max(down[number + 1], down[number] + distance)
    for number, distance in reversed(list(enumerate(apart))):
        up[number] = min(up[number], up[number + 1] - distance)
    for slot, one, other in zip(layer, down, up, strict=True):
        slot.y = (one + other) / 2


def _points(chain: list[_Slot], source: Box, top: float, stride: float) -> list[tuple[float, float]]:
    """Of one line. The lines at one side of a box are in the order of where they come from or go to."""
    first, last = chain[0], chain[-1]
    leave = first.y + 9 * (_rank(first.after, chain[1]) - (len(first.after) - 1) / 2)
    enter = last.y + PORT * (_rank(last.before, chain[-2]) - (len(last.before) - 1) / 2)
    x = source.x + source.width
    points = [(x, leave - top)]
    for number, slot in enumerate(chain[1:], start=1):
        y = (enter if slot is last else slot.y) - top
        left = x + (number - 1) * stride + BEND
        points += [(left, y), (left + LABEL + (0 if slot is last else source.width), y)]
    return points


def _rank(neighbours: list[_Slot], one: _Slot) -> int:
    return sorted(neighbours, key=lambda slot: slot.y).index(one)

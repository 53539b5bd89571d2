"""Who holds which slice of which checkpoint tensor: pure data, and the arithmetic of training shards. No process, no tensor, no vLLM."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""For each dimension of a tensor the range start, stop."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the checkpoint, or a parameter that a trainer keeps in its place."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it, without the prefix: `bfloat16`."""

    @property
    def whole(self) -> Box:
        """All of it."""
        return tuple((0, size) for size in self.shape)

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Slices of checkpoint tensors by process: those that it holds (a trainer), or those that it needs (a rollout engine)."""

    tensors: Mapping[str, Tensor]
    """In the checkpoint's order. A rollout's dtype is the one that it wants the tensor in, and that goes over the wire."""
    boxes: Mapping[int, Mapping[str, tuple[Box, ...]]]
    """By process, by name: boxes that do not overlap. A name of which a process has nothing is left out."""


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor as it lies inside a parameter of the trainer."""

    parameter: str
    box: Box
    """Of the parameter. Its dimensions longer than 1 are those of the checkpoint tensor, in order."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One division of a parameter along one dimension, as `torch.chunk` does it: the last parts are smaller, or empty."""

    dimension: int
    parts: int
    part: int


def volume(box: Box) -> int:
    """Elements."""
    return math.prod(stop - start for start, stop in box)


def sizes(box: Box) -> list[int]:
    """Of its dimensions."""
    return [stop - start for start, stop in box]


def relative(box: Box, outer: Box) -> Box:
    """`box` in the coordinates of a tensor that holds `outer` alone."""
    return tuple((start - low, stop - low) for (start, stop), (low, _) in zip(box, outer, strict=True))


def indices(box: Box) -> tuple[slice, ...]:
    """By which a tensor gives the box."""
    return tuple(slice(start, stop) for start, stop in box)


def intersection(first: Box, second: Box) -> Box | None:
    """None where they share nothing."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def difference(box: Box, taken: Box) -> Iterator[Box]:
    """`box` without `taken`, as boxes that do not overlap: at most two for each dimension."""
    shared = intersection(box, taken)
    if shared is None:
        yield box
        return
    for dimension, ((start, stop), (low, high)) in enumerate(zip(box, shared, strict=True)):
        for side in ((start, low), (high, stop)):
            if side[0] < side[1]:
                yield (*shared[:dimension], side, *box[dimension + 1 :])


def without(boxes: Iterable[Box], taken: Iterable[Box]) -> list[Box]:
    """What of `boxes` lies in none of `taken`."""
    left = list(boxes)
    for other in taken:
        left = [rest for box in left for rest in difference(box, other)]
    return left


def cut(whole: Box, cuts: Iterable[Cut]) -> Box:
    """What is left of `whole` after the cuts, each of which divides what the one before left."""
    ranges = list(whole)
    for each in cuts:
        start, stop = ranges[each.dimension]
        size = -(-(stop - start) // each.parts)
        ranges[each.dimension] = (min(start + each.part * size, stop), min(start + (each.part + 1) * size, stop))
    return tuple(ranges)


def cuts(placements: Sequence[object], mesh_shape: Sequence[int], coordinate: Sequence[int]) -> list[Cut]:
    """A DTensor's placements as cuts, in the order in which they were made.

    A strided shard (FSDP over a parameter that tensor parallelism had divided before along the same dimension) stands left of the division
    that came before it, so it is taken last. ValueError for placements that do not say who holds what (partial sums).
    """
    first: list[Cut] = []
    last: list[Cut] = []
    for placement, parts, part in zip(placements, mesh_shape, coordinate, strict=True):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise ValueError(f"a parameter placed as {placement} has no slice that a rank holds; only Shard and Replicate have")
        (last if kind == "_StridedShard" else first).append(Cut(placement.dim, parts, part))  # type: ignore[attr-defined]
    return first + last


def through(part: Part, held: Box, tensor: Tensor) -> Box | None:
    """What a process that holds `held` of a parameter has of the checkpoint tensor inside it; in that tensor's coordinates."""
    shared = intersection(part.box, held)
    if shared is None:
        return None
    long = iter([(a - start, b - start) for (a, b), (start, stop) in zip(shared, part.box, strict=True) if stop - start > 1])
    return tuple((0, 1) if size == 1 else next(long) for size in tensor.shape)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a trainer divides its parameters: copies x shards (FSDP2, hybrid sharding), and tensor parallelism inside of that.

    Shards count in the mesh's order: process `mesh[copy][shard][tensor]`.
    """

    mesh: tuple[tuple[tuple[int, ...], ...], ...]
    shard_dimension: Mapping[str, int]
    """By parameter: the dimension that FSDP divides, where that is not 0."""
    tensor_dimension: Mapping[str, int]
    """By parameter: the dimension that tensor parallelism divides; a parameter that is not named is a copy on each of those ranks."""

    def held(self, parameter: str, tensor: Tensor) -> Iterator[tuple[int, Box]]:
        """Every process, with what it holds of the parameter."""
        for copy in self.mesh:
            for shard, group in enumerate(copy):
                for position, process in enumerate(group):
                    divided = [Cut(self.tensor_dimension[parameter], len(group), position)] if parameter in self.tensor_dimension else []
                    divided.append(Cut(self.shard_dimension.get(parameter, 0), len(copy), shard))
                    yield process, cut(tensor.whole, divided)


def training_layout(checkpoint: Mapping[str, Tensor], parts: Mapping[str, Part], parameters: Mapping[str, Tensor], sharding: Sharding) -> Layout:
    """What each training process holds. `parts` says where each checkpoint tensor lies in `parameters`.

    Raises ValueError for a dimension that FSDP2 would refuse to divide: any but the first must be divisible.
    """
    shards = len(sharding.mesh[0])
    inside: dict[str, list[str]] = {}
    for name, part in parts.items():
        inside.setdefault(part.parameter, []).append(name)
    boxes: dict[int, dict[str, tuple[Box, ...]]] = {process: {} for copy in sharding.mesh for group in copy for process in group}
    for parameter, tensor in parameters.items():
        dimension = sharding.shard_dimension.get(parameter, 0)
        if dimension and not divisible(parameter, tensor, dimension, sharding):
            raise ValueError(f"{parameter} {tensor.shape}: FSDP cannot divide dimension {dimension} among {shards} ranks; leave it at dimension 0")
        for process, held in sharding.held(parameter, tensor):
            for name in inside.get(parameter, []):
                box = through(parts[name], held, checkpoint[name])
                if box is not None:
                    boxes[process][name] = (box,)
    return Layout(tensors=checkpoint, boxes=boxes)


def divisible(parameter: str, tensor: Tensor, dimension: int, sharding: Sharding) -> bool:
    """Whether FSDP can divide that dimension evenly, after tensor parallelism has."""
    size = tensor.shape[dimension]
    if sharding.tensor_dimension.get(parameter) == dimension:
        size //= len(sharding.mesh[0][0])
    return size % len(sharding.mesh[0]) == 0


def contained_mesh(processes: int, shards: int, rollout_parts: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """An order of ranks in which each shard lies inside what its process needs as tensor-parallel rank `process % rollout_parts`.

    With N shards and t parts the shard of process r is s(r) = (r mod t) N/t + r div t; copies (hybrid sharding) repeat it. With fewer shards
    than parts it is the other way round, and what a process needs lies inside its shard. A device mesh in this order needs process
    groups in this order: torch sorts the ranks of the groups that it makes by itself, and FSDP2 divides by rank in the group.

    Raises ValueError where neither of `shards` and `rollout_parts` divides the other, or one of them not `processes`.
    """
    if processes % shards or processes % rollout_parts or (shards % rollout_parts and rollout_parts % shards):
        raise ValueError(
            f"{processes} ranks in {shards} shards cannot be laid over {rollout_parts} tensor-parallel ranks: "
            "each number must divide the one before it, or rollout and shards trade places"
        )
    owners: list[list[int]] = [[] for _ in range(shards)]
    for process in range(processes):
        part, engine = process % rollout_parts, process // rollout_parts
        if shards >= rollout_parts:
            each = shards // rollout_parts
            owners[part * each + engine % each].append(process)
        else:
            owners[part * shards // rollout_parts].append(process)
    return tuple(tuple((owner[copy],) for owner in owners) for copy in range(processes // shards))


def plain_mesh(processes: int, shards: int, tensor_parts: int = 1) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Ranks in order: copies of `shards` groups of `tensor_parts` neighbours."""
    numbers = iter(range(processes))
    return tuple(tuple(tuple(next(numbers) for _ in range(tensor_parts)) for _ in range(shards)) for _ in range(processes // (shards * tensor_parts)))


def row_dimensions(
    rollout: Layout, parts: Mapping[str, Part], parameters: Mapping[str, Tensor], fits: Callable[[str, Tensor, int], bool]
) -> dict[str, int]:
    """By parameter: the dimension along which the rollout divides what lies in it, where that is not 0 and `fits` FSDP.

    FSDP that divides there too (`fully_shard(..., shard_placement_fn=...)`) has shards inside the targets. Where the checkpoint tensors of
    one parameter (a layer's experts) are divided along different dimensions, the first one that is not 0 is taken.
    """
    chosen: dict[str, int] = {}
    for name, part in parts.items():
        tensor = rollout.tensors[name]
        targets = [box for needs in rollout.boxes.values() for box in needs.get(name, ())]
        divided = next((d for d in range(len(tensor.shape)) if any(box[d] != (0, tensor.shape[d]) for box in targets)), 0)
        long = [d for d, (start, stop) in enumerate(part.box) if stop - start > 1]
        rank = sum(size > 1 for size in tensor.shape[:divided])
        dimension = long[rank] if rank < len(long) else 0
        # A parameter that holds several tensors side by side along this dimension has them in blocks, which its shards do not follow.
        alone = part.box[dimension] == (0, parameters[part.parameter].shape[dimension])
        if dimension and alone and fits(part.parameter, parameters[part.parameter], dimension):
            chosen.setdefault(part.parameter, dimension)
    return chosen

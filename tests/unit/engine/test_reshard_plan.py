"""Every needed element arrives once, from a rank that holds it; counted here element by element, where the plan counts boxes."""

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.reshard.layout import (
    Box,
    Cut,
    Layout,
    Part,
    Sharding,
    Tensor,
    contained_mesh,
    cut,
    difference,
    divisible,
    intersection,
    plain_mesh,
    row_dimensions,
    training_layout,
    volume,
)
from engine.reshard.plan import Plan, divided, make_plan

LARGE = 1 << 40


def numbers(tensor: Tensor, box: Box) -> np.ndarray:
    """Element numbers that a box covers, in row-major order."""
    return np.arange(tensor.elements).reshape(tensor.shape)[tuple(slice(*bounds) for bounds in box)].ravel()


def whole_parts(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    return {name: Part(name, tensor.whole) for name, tensor in tensors.items()}


def rollout_of(tensors: Mapping[str, Tensor], dimensions: Mapping[str, int | None], parts: int, processes: range) -> Layout:
    """Tensor parallelism as a rollout engine does it; None: every rank needs all."""
    boxes = {
        process: {
            name: (box,)
            for name, tensor in tensors.items()
            if volume(box := cut(tensor.whole, [] if dimensions[name] is None else [Cut(dimensions[name], parts, process % parts)]))
        }
        for process in processes
    }
    return Layout(tensors, boxes)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, Layout, int]:
    ranks, parts = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4]))
    copies = draw(st.sampled_from([c for c in (1, 2, 4) if ranks % c == 0]))
    shapes = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4))
    tensors = {f"t{i}": Tensor(tuple(shape), draw(st.sampled_from(["bfloat16", "float32"]))) for i, shape in enumerate(shapes)}
    dimensions = {name: draw(st.sampled_from([None, *range(len(tensor.shape))])) for name, tensor in tensors.items()}
    plain = Sharding(plain_mesh(ranks, ranks // copies), {}, {})
    dims = {name: draw(st.sampled_from([d for d in range(len(t.shape)) if d == 0 or divisible(name, t, d, plain)])) for name, t in tensors.items()}
    order = draw(st.permutations(range(ranks)))
    mesh = tuple(tuple(tuple(order[process] for process in group) for group in copy) for copy in plain.mesh)
    training = training_layout(tensors, whole_parts(tensors), tensors, Sharding(mesh, dims, {}))
    first = draw(st.sampled_from([0, ranks]))  # the same processes, or others
    return training, rollout_of(tensors, dimensions, parts, range(first, first + max(ranks, parts))), draw(st.integers(16, 400))


def delivered(plan: Plan, destination: int, name: str, tensor: Tensor) -> list[int]:
    return [
        int(number)
        for messages in plan.rounds
        for message in messages
        if message.destination == destination
        for piece in message.pieces
        if piece.tensor == name
        for number in numbers(tensor, piece.box)
    ]


@settings(max_examples=150)
@given(cases())
def test_every_missing_element_is_delivered_once_by_a_rank_that_holds_it(case: tuple[Layout, Layout, int]) -> None:
    """Mutations tried: `missing = list(needed)` in `_sources` (own elements are sent); `missing` not reduced there (copies deliver twice)."""
    training, rollout, bucket = case
    plan = make_plan(training, rollout, bucket)
    for process, needs in rollout.boxes.items():
        lacking = 0
        for name, tensor in rollout.tensors.items():
            held = {int(n) for box in training.boxes.get(process, {}).get(name, ()) for n in numbers(tensor, box)}
            needed = {int(n) for box in needs.get(name, ()) for n in numbers(tensor, box)}
            assert sorted(delivered(plan, process, name, tensor)) == sorted(needed - held)
            lacking += len(needed - held) * {"bfloat16": 2, "float32": 4}[tensor.dtype]
        volumes = plan.volumes[process]
        assert volumes.received == volumes.minimum == lacking >= volumes.bound
    for message in (message for messages in plan.rounds for message in messages):
        assert message.source != message.destination
        for piece in message.pieces:
            assert any(intersection(piece.box, box) == piece.box for box in training.boxes[message.source][piece.tensor])


@settings(max_examples=100)
@given(cases())
def test_buckets_are_bounded(case: tuple[Layout, Layout, int]) -> None:
    """Mutation: leaving the source's load out of the room that `_rounds` asks for lets one that sends to many exceed its bucket."""
    training, rollout, bucket = case
    plan = make_plan(training, rollout, bucket)
    for messages in plan.rounds:
        assert messages
        for process in plan.volumes:
            assert sum(message.bytes for message in messages if process in (message.source, message.destination)) <= bucket
        pairs = [(message.source, message.destination) for message in messages]
        assert len(pairs) == len(set(pairs))
    assert plan.peak_buffer <= 2 * bucket
    assert sum(message.bytes for messages in plan.rounds for message in messages) == sum(volumes.received for volumes in plan.volumes.values())


@pytest.mark.parametrize(("ranks", "parts"), [(ranks, parts) for ranks in (1, 2, 4, 8, 16) for parts in (1, 2, 4, 8) if ranks % parts == 0])
def test_contained_shards_leave_the_bound(ranks: int, parts: int) -> None:
    """Bytes received are M/t - M/N on every rank.

    Mutation tried: a contiguous order (`plain_mesh`) leaves the bound at N 4, t 2 and beyond; so does dimension 0 for the row-parallel tensor.
    """
    tensors = {"column": Tensor((32, 16), "bfloat16"), "row": Tensor((16, 32), "bfloat16")}
    rollout = rollout_of(tensors, {"column": 0, "row": 1}, parts, range(ranks))
    mesh = contained_mesh(ranks, ranks, parts)
    rows = row_dimensions(rollout, whole_parts(tensors), tensors, lambda name, tensor, d: divisible(name, tensor, d, Sharding(mesh, {}, {})))
    assert rows == ({"row": 1} if parts > 1 else {})
    plan = make_plan(training_layout(tensors, whole_parts(tensors), tensors, Sharding(mesh, rows, {})), rollout, LARGE)
    size = 2 * sum(tensor.elements for tensor in tensors.values())
    assert {volumes.received for volumes in plan.volumes.values()} == {size // parts - size // ranks}
    assert {volumes.full_gather for volumes in plan.volumes.values()} == {2 * size * (ranks - 1) // ranks}


def test_the_order_is_that_of_the_formula() -> None:
    """s(r) = (r mod t) N/t + r div t. For N 8, t 4: 0 2 4 6 1 3 5 7."""
    shard_of = {group[0]: shard for copy in contained_mesh(8, 8, 4) for shard, group in enumerate(copy)}
    assert [shard_of[process] for process in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize(("ranks", "shards", "parts"), [(8, 4, 2), (8, 2, 4), (8, 2, 2), (8, 1, 4), (16, 8, 4), (4, 2, 1)])
def test_copies_are_contained_too(ranks: int, shards: int, parts: int) -> None:
    """Hybrid sharding: a rank with 1/S of the model that needs 1/t of it receives what is more. Mutation: `engine % each` without the modulo."""
    tensors = {"column": Tensor((16, 4), "float32")}
    mesh = contained_mesh(ranks, shards, parts)
    assert sorted(process for copy in mesh for group in copy for process in group) == list(range(ranks))
    training = training_layout(tensors, whole_parts(tensors), tensors, Sharding(mesh, {}, {}))
    plan = make_plan(training, rollout_of(tensors, {"column": 0}, parts, range(ranks)), LARGE)
    assert {volumes.received for volumes in plan.volumes.values()} == {max(0, 256 // parts - 256 // shards)}


def test_an_order_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="6 ranks in 6 shards cannot be laid over 4"):
        contained_mesh(6, 6, 4)


def test_copies_share_the_sending() -> None:
    """Four ranks hold the same, four others need it: each sends once. Mutation: `source = sources[0]` makes rank 0 send it all."""
    tensors = {"t": Tensor((8, 8), "float32")}
    training = training_layout(tensors, whole_parts(tensors), tensors, Sharding(plain_mesh(4, 1), {}, {}))
    plan = make_plan(training, rollout_of(tensors, {"t": None}, 1, range(4, 8)), LARGE)
    assert [plan.volumes[process].sent for process in range(8)] == [256] * 4 + [0] * 4


def test_a_slice_beyond_the_bucket_is_divided() -> None:
    tensors = {"t": Tensor((64, 64), "float32")}
    training = training_layout(tensors, whole_parts(tensors), tensors, Sharding(plain_mesh(1, 1), {}, {}))
    plan = make_plan(training, rollout_of(tensors, {"t": None}, 1, range(1, 2)), 1024)
    assert plan.largest_slice == 64 * 64 * 4
    # 1024 bytes hold four rows of 256: 16 full rounds.
    assert [sum(message.bytes for message in messages) for messages in plan.rounds] == [1024] * 16


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 40))
def test_divided_boxes_cover_without_overlap(shape: list[int], elements: int) -> None:
    tensor = Tensor(tuple(shape), "float32")
    boxes = list(divided(tensor.whole, elements))
    assert all(volume(box) <= elements for box in boxes)
    assert [n for box in boxes for n in numbers(tensor, box)] == list(range(tensor.elements))


@given(st.data())
def test_difference_is_what_intersection_leaves(data: st.DataObject) -> None:
    """Mutation tried: leaving `shared[:dimension]` out of `difference` in favour of `box[:dimension]` counts corners twice."""
    tensor = Tensor(tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))), "float32")
    box, taken = (
        tuple(sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in tensor.shape)  # type: ignore[misc]
        for _ in range(2)
    )
    box, taken = (tuple((a, b) for a, b in each) for each in (box, taken))
    left = [n for rest in difference(box, taken) for n in numbers(tensor, rest)]
    assert sorted(left) == sorted(set(numbers(tensor, box)) - set(numbers(tensor, taken)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda training: Layout({}, training.boxes), r"the trainer lacks \['t'\]"),
        (lambda training: Layout({**training.tensors, "u": Tensor((1,), "float32")}, training.boxes), r"the rollout \['u'\]"),
        (lambda training: Layout({"t": Tensor((4, 8), "float32")}, training.boxes), r"t: the trainer's shape is \(4, 8\), the rollout's \(8, 4\)"),
        (lambda training: Layout(training.tensors, {0: training.boxes[0]}), "t: no training rank holds"),
    ],
)
def test_what_does_not_fit_is_named(change: object, said: str) -> None:
    tensors = {"t": Tensor((8, 4), "float32")}
    training = training_layout(tensors, whole_parts(tensors), tensors, Sharding(plain_mesh(2, 2), {}, {}))
    with pytest.raises(ValueError, match=said):
        make_plan(change(training), rollout_of(tensors, {"t": None}, 1, range(2)), LARGE)  # type: ignore[operator]
    with pytest.raises(ValueError, match="bucket_bytes=8 is too small"):
        make_plan(training, rollout_of(tensors, {"t": None}, 1, range(2)), 8)


def test_experts_in_one_parameter() -> None:
    """Checkpoint tensors [I, H] inside a parameter [E, 2I, H] that is divided by experts: each lies whole on one rank."""
    parts = {f"{e}.{kind}": Part("experts", ((e, e + 1), (start, start + 3), (0, 2))) for e in range(4) for kind, start in (("gate", 0), ("up", 3))}
    tensors = {name: Tensor((3, 2), "bfloat16") for name in parts}
    layout = training_layout(tensors, parts, {"experts": Tensor((4, 6, 2), "bfloat16")}, Sharding(plain_mesh(2, 2), {}, {}))
    assert layout.boxes[1] == {f"{e}.{kind}": (((0, 3), (0, 2)),) for e in (2, 3) for kind in ("gate", "up")}
    across = training_layout(tensors, parts, {"experts": Tensor((4, 6, 2), "bfloat16")}, Sharding(plain_mesh(2, 2), {"experts": 1}, {}))
    assert across.boxes[0] == {f"{e}.gate": (((0, 3), (0, 2)),) for e in range(4)}


def test_fsdp_divides_other_dimensions_evenly_or_not_at_all() -> None:
    tensors = {"t": Tensor((4, 6), "float32")}
    with pytest.raises(ValueError, match=r"t \(4, 6\): FSDP cannot divide dimension 1 among 4"):
        training_layout(tensors, whole_parts(tensors), tensors, Sharding(plain_mesh(4, 4), {"t": 1}, {}))


@given(st.integers(0, 40), st.integers(1, 9))
def test_cuts_cover(size: int, parts: int) -> None:
    boxes = [cut(((0, size),), [Cut(0, parts, part)]) for part in range(parts)]
    assert [n for ((start, stop),) in boxes for n in range(start, stop)] == list(range(size))
    assert max(math.prod(b - a for a, b in box) for box in boxes) == -(-size // parts)

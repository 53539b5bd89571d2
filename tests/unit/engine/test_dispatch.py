"""Spreading arguments over ranks and putting results together again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch
from engine.control.dispatch import ALL, DATA_PARALLEL, EACH, METRICS, RANK_ZERO, Mode, Share, assemble, cut, register
from engine.control.mesh import Mesh
from engine.metrics import Mean, Statistics

ranks = st.integers(1, 6)


def rows(count: int) -> Batch:
    return Batch(tensors={"row": torch.arange(count), "input_ids": torch.arange(count * 2).view(count, 2)}, objects={"name": list(range(count))})


# Mutations: `value[rank::ranks]` (order); `len // ranks` for every part (the rest is lost); the longer parts last (not Batch.chunk's way).
@given(items=st.lists(st.integers()), ranks=ranks)
def test_lists_come_back_as_they_were(items: list[int], ranks: int) -> None:
    parts = [cut(items, Share(rank, ranks)) for rank in range(ranks)]
    assert DATA_PARALLEL.gather(parts) == items
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(count=st.integers(0, 13), ranks=ranks)
def test_lists_and_batches_are_cut_alike(count: int, ranks: int) -> None:
    # Rows go out as a list, and what is made of them is cut as a batch: they must meet on the same rank.
    batch = rows(count)
    parts = [cut(batch, Share(rank, ranks)) for rank in range(ranks)]
    assert [part.objects["name"] for part in parts] == [cut(list(range(count)), Share(rank, ranks)) for rank in range(ranks)]
    whole = DATA_PARALLEL.gather(parts)
    assert torch.equal(whole.tensors["row"], batch.tensors["row"])
    assert torch.equal(whole.tensors["input_ids"], batch.tensors["input_ids"])


@pytest.mark.parametrize("value", [3, "three", (1, 2, 3), {"a": [1]}, None])
def test_everything_else_goes_to_all(value: object) -> None:
    # A tuple too: only what has rows is cut.
    assert cut(value, Share(1, 3)) == value


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4), of=ranks, data=st.data())
def test_shares_are_put_together_from_any_parts(sizes: list[int], of: int, data: st.DataObject) -> None:
    # Mutations: rows taken by their place in the part instead of in the whole; order applied to a share instead of to the whole; parts
    # fetched in another order than they are numbered.
    total = sum(sizes)
    order = data.draw(st.none() | st.permutations(range(total)))
    whole = rows(total)
    parts = [whole.rows(slice(sum(sizes[:part]), sum(sizes[: part + 1]))) for part in range(len(sizes))]
    fetched: list[int] = []

    def fetch(numbers: list[int]) -> list[Batch]:
        fetched.extend(numbers)
        return [parts[number] for number in numbers]

    shares = [assemble(fetch, sizes, order, Share(index, of)) for index in range(of)]
    expected = list(range(total)) if order is None else list(order)
    assert [name for share in shares for name in share.objects["name"]] == expected
    assert [len(share) for share in shares] == [len(Share(index, of).range(total)) for index in range(of)]


def test_only_what_is_needed_is_fetched() -> None:
    fetched: list[int] = []

    def fetch(numbers: list[int]) -> list[list[int]]:
        fetched.extend(numbers)
        return [[10 * number, 10 * number + 1] for number in numbers]

    # Mutation: fetch all parts.
    assert assemble(fetch, [2, 2, 2, 2], None, Share(1, 2)) == [20, 21, 30, 31]
    assert fetched == [2, 3]


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), of=st.integers(1, 5), data=st.data())
def test_rows_may_be_left_out_and_come_again(sizes: list[int], of: int, data: st.DataObject) -> None:
    # Mutation: shares of all rows instead of the chosen ones.
    order = data.draw(st.lists(st.integers(0, sum(sizes) - 1), max_size=12))
    parts = [list(range(sum(sizes[:part]), sum(sizes[: part + 1]))) for part in range(len(sizes))]
    shares = [assemble(lambda numbers: [parts[number] for number in numbers], sizes, order, Share(index, of)) for index in range(of)]
    assert [row for share in shares for row in share] == order
    assert [len(share) for share in shares] == [len(Share(index, of).range(len(order))) for index in range(of)]


@pytest.mark.parametrize("order", [[0, 3], [-1]])
def test_rows_that_there_are_not_cannot_be_chosen(order: list[int]) -> None:
    with pytest.raises(ValueError, match=f"there is no row {order[-1]}: the parts have 3 rows"):
        assemble(lambda numbers: [[1, 2, 3]], [3], order, Share())


def test_metrics_are_merged_not_averaged() -> None:
    # (1 + 2 + 6) / 3, not ((1 + 2) / 2 + 6) / 2. Mutation: mean of the ranks' results.
    parts = [Statistics({"x": Mean.of([1.0, 2.0])}), Statistics({"x": Mean.of([6.0])})]
    assert METRICS.gather(parts).result() == {"x": 3.0}
    with pytest.raises(TypeError, match="must return Statistics, not dict"):
        METRICS.gather([{"x": 1.0}])


def test_a_result_without_meaning_as_a_whole_is_refused() -> None:
    with pytest.raises(TypeError, match="must return a Batch or a list, not float"):
        DATA_PARALLEL.gather([1.0, 2.0])


def test_ranks_that_share_a_part_are_given_the_same_and_one_speaks() -> None:
    # Mutations: `rank % size` for the part; the last of a group speaks.
    mesh = Mesh.grouped(4, 2)
    assert [DATA_PARALLEL.share(mesh, rank) for rank in range(4)] == [Share(0, 2), Share(0, 2), Share(1, 2), Share(1, 2)]
    assert [DATA_PARALLEL.speaks(mesh, rank) for rank in range(4)] == [True, False, True, False]
    assert mesh.parts == 2
    with pytest.raises(ValueError, match="4 ranks cannot be divided into groups of 3"):
        Mesh.grouped(4, 3)


def test_who_is_called_and_with_what() -> None:
    mesh = Mesh.grouped(3)
    assert list(ALL.ranks(mesh)) == list(EACH.ranks(mesh)) == [0, 1, 2]
    assert list(RANK_ZERO.ranks(mesh)) == [0]
    assert ALL.spread([1, 2, 3], mesh, 1) == RANK_ZERO.spread([1, 2, 3], mesh, 0) == [1, 2, 3]
    assert DATA_PARALLEL.spread([1, 2, 3], mesh, 1) == [2]
    assert EACH.spread([1, 2, 3], mesh, 1) == 2
    assert EACH.spread("all", mesh, 1) == "all"
    with pytest.raises(ValueError, match="2 items cannot go to 3 ranks"):
        EACH.spread([1, 2], mesh, 0)


def test_register_marks_a_method_and_leaves_it_as_it_is() -> None:
    class Reversed(Mode):
        """A mode of one's own."""

    mode = Reversed()

    def method(self: object, value: int) -> int:
        return value + 1

    marked = register(mode, mesh="train", beside=True)(method)
    assert marked is method
    registration = marked.__registration__  # type: ignore[attr-defined]
    assert (registration.mode, registration.mesh, registration.beside) == (mode, "train", True)

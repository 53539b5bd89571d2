"""Spreading arguments over ranks and putting results together again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch
from engine.control.dispatch import Dispatch, gather, register, split
from engine.metrics import Mean, Statistics

ranks = st.integers(1, 6)


# Mutations: `argument[rank::ranks]` (order); `len // ranks` for every part (the rest is lost); the longer parts last (not Batch.chunk's way).
@given(items=st.lists(st.integers()), ranks=ranks)
def test_lists_come_back_as_they_were(items: list[int], ranks: int) -> None:
    parts = split(items, ranks)
    assert gather(parts) == items
    sizes = [len(part) for part in parts]
    assert len(sizes) == ranks
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(rows=st.integers(0, 13), ranks=ranks)
def test_lists_and_batches_are_cut_alike(rows: int, ranks: int) -> None:
    # Requests go out as a list, and what is made of them is cut as a batch: rows must meet on the same rank.
    batch = Batch(tensors={"row": torch.arange(rows), "input_ids": torch.arange(rows * 2).view(rows, 2)}, objects={"name": list(range(rows))})
    parts = split(batch, ranks)
    assert [part.objects["name"] for part in parts] == split(list(range(rows)), ranks)
    whole = gather(parts)
    assert torch.equal(whole.tensors["row"], batch.tensors["row"])
    assert torch.equal(whole.tensors["input_ids"], batch.tensors["input_ids"])


@pytest.mark.parametrize("value", [3, "three", (1, 2, 3), {"a": [1]}, None])
def test_everything_else_goes_to_all(value: object) -> None:
    # A tuple too: only what has rows is cut.
    assert split(value, 3) == [value] * 3


def test_statistics_are_merged_not_averaged() -> None:
    # (1 + 2 + 6) / 3, not ((1 + 2) / 2 + 6) / 2. Mutation: mean of the ranks' results.
    parts = [Statistics({"x": Mean.of([1.0, 2.0])}), Statistics({"x": Mean.of([6.0])})]
    assert gather(parts).result() == {"x": 3.0}


def test_a_result_without_meaning_as_a_whole_is_refused() -> None:
    with pytest.raises(TypeError, match="must return a Batch, a list or Statistics, not float"):
        gather([1.0, 2.0])


def test_register_marks_a_method_and_leaves_it_as_it_is() -> None:
    def method(self: object, value: int) -> int:
        return value + 1

    marked = register(Dispatch.DATA_PARALLEL)(method)
    assert marked is method
    assert marked.__dispatch__ is Dispatch.DATA_PARALLEL  # type: ignore[attr-defined]

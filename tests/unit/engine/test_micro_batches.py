"""Cutting a rank's rows into passes: nothing lost, nothing twice, nothing too large, and as many passes on every rank."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch
from engine.training import micro_batches as module
from engine.training.micro_batches import micro_batches


def batch(lengths: list[int]) -> Batch:
    """Row i holds the token i + 1 everywhere, so that a row can be told from another wherever it goes."""
    width = max(lengths, default=0) + 2  # Wider than the longest row, as a rank's part of a larger batch is.
    mask = torch.arange(width) < torch.tensor(lengths, dtype=torch.int64).unsqueeze(1)
    number = torch.arange(1, len(lengths) + 1)
    return Batch(
        tensors={"input_ids": number.unsqueeze(1) * mask, "attention_mask": mask, "response_mask": mask.clone(), "row": number}, meta={"step": 3}
    )


def rows(parts: list[Batch]) -> list[list[int]]:
    return [part.tensors["row"].tolist() for part in parts]


lengths_of_rows = st.lists(st.integers(1, 30), min_size=1, max_size=25)
both_ways = pytest.mark.parametrize("padded", [True, False], ids=["padded", "packed"])


# Mutations: a row that is too long finds no part (it is lost, or there is no end); the sum of lengths instead of rows x widest, padded;
# ascending order, padded (later rows are longer than the first, and the bound is broken); `<` instead of `<=`.
@both_ways
@given(lengths=lengths_of_rows, max_tokens=st.integers(1, 100))
def test_every_row_once_and_none_too_large(padded: bool, lengths: list[int], max_tokens: int) -> None:
    whole = batch(lengths)
    parts = micro_batches(whole, max_tokens, padded=padded, group=None)
    assert sorted(itertools.chain(*rows(parts))) == list(range(1, len(lengths) + 1))
    for part in parts:
        ids, mask = part.tensors["input_ids"], part.tensors["attention_mask"]
        assert len(part) == 1 or (ids.numel() if padded else int(mask.sum())) <= max_tokens
        # Trimmed, and no further than its longest row.
        assert ids.shape[1] == max(lengths[row - 1] for row in part.tensors["row"].tolist())
        assert mask.sum(dim=1).tolist() == [lengths[row - 1] for row in part.tensors["row"].tolist()]
        assert torch.equal(ids, part.tensors["row"].unsqueeze(1) * mask)
        assert part.meta == whole.meta


@given(lengths=lengths_of_rows)
def test_rows_of_similar_length_stand_together_where_padding_counts(lengths: list[int]) -> None:
    # Mutation: leave the order as it is: a long row widens every pass.
    parts = micro_batches(batch(lengths), 60, padded=True, group=None)
    spans = [part.tensors["attention_mask"].sum(dim=1) for part in parts]
    assert torch.cat(spans).tolist() == sorted(lengths, reverse=True)


@given(lengths=lengths_of_rows, max_tokens=st.integers(30, 100))
def test_packed_passes_are_few(lengths: list[int], max_tokens: int) -> None:
    # Mutation: a part for each row. (Looking at the last part only, next fit, is found by the example below.)
    parts = len(micro_batches(batch(lengths), max_tokens, padded=False, group=None))
    # Any two parts of first fit together are more than full, so all but one are more than half full.
    assert (parts - 1) * max_tokens < 2 * sum(lengths)


@given(lengths=lengths_of_rows, wanted=st.integers(1, 6))
def test_packed_passes_are_about_equally_full(lengths: list[int], wanted: int) -> None:
    # Mutations: leave parts as first fit filled them: ranks would wait for each other; give rows to the parts in turn.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.dist, "is_initialized", lambda: True)
        patch.setattr(module.dist, "all_reduce", lambda own, **_: own.fill_(wanted))
        parts = micro_batches(batch(lengths), 1000, padded=False, group=None)
    assert len(parts) == wanted
    masks = [part.tensors["attention_mask"].sum(dim=1) for part in parts if part.tensors["response_mask"].any()]
    assert len(masks) == min(wanted, len(lengths))  # Mutation: parts of one token while there are rows left to spread.
    tokens = [int(mask.sum()) for mask in masks]
    assert tokens == sorted(tokens, reverse=True)  # Mutation: in order of parts: a rank's fullest pass would meet another's emptiest.
    assert all(int(mask.sum()) - int(mask.min()) <= tokens[-1] for mask in masks)


def test_passes_that_cannot_be_equally_full_stay_full() -> None:
    # First fit: 5 + 4 and 3 + 3 + 3. The longest to the emptiest: 5 + 3 and 4 + 3 + 3, one token more than 9.
    # Mutation: take the equally full parts whatever they hold: a pass would be larger than allowed.
    assert rows(micro_batches(batch([5, 4, 3, 3, 3]), 9, padded=False, group=None)) == [[1, 2], [3, 4, 5]]


def test_an_example() -> None:
    # Padded: two rows of width 9 have 18 > 12 tokens; two of width 6 have 12; the 3 is left. Packed: 9 + 3 and 6 + 5 tokens.
    assert rows(micro_batches(batch([5, 9, 3, 6]), 12, padded=True, group=None)) == [[2], [4, 1], [3]]
    assert rows(micro_batches(batch([5, 9, 3, 6]), 12, padded=False, group=None)) == [[2, 3], [4, 1]]


@both_ways
@pytest.mark.parametrize(("lengths", "own"), [([4], 1), ([], 0)], ids=["fewer parts", "no row"])
def test_every_rank_makes_as_many(monkeypatch: pytest.MonkeyPatch, padded: bool, lengths: list[int], own: int) -> None:
    asked = object()

    def another_rank_has_three(wanted: torch.Tensor, op: object, group: object) -> None:
        assert op is torch.distributed.ReduceOp.MAX
        assert group is asked  # Mutation: ask all ranks; those that share a model's layers would be waited for twice, or for ever.
        assert wanted.item() == own
        wanted.fill_(3)

    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "all_reduce", another_rank_has_three)
    whole = batch(lengths)
    parts = micro_batches(whole, 100, padded=padded, group=asked)  # type: ignore[arg-type]
    # Mutations: as many as this rank needs (the others would wait for it for ever); repeat a real part (its rows would count twice).
    assert len(parts) == 3
    for part in parts[own:]:
        assert not part.tensors["response_mask"].any()
        assert part.tensors["input_ids"].numel() == 1
        assert {name: (tensor.dtype, tensor.ndim) for name, tensor in part.tensors.items()} == {
            name: (tensor.dtype, tensor.ndim) for name, tensor in whole.tensors.items()
        }

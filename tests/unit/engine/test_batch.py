"""Batch: strict about its columns, and the same rows after every cutting and joining."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch, concat, join


def make(rows: int, tokens: int = 3, offset: int = 0) -> Batch:
    count = torch.arange(offset, offset + rows)
    return Batch(
        tensors={
            "input_ids": count[:, None] * 100 + 1 + torch.arange(tokens),
            "response_mask": torch.ones(rows, tokens, dtype=torch.bool),
            "logits": torch.ones(rows, tokens, 2),
            "rewards": count.float(),
        },
        objects={"sample_id": [f"s{number}" for number in count.tolist()]},
        meta={"step": 7},
    )


def assert_equal(one: Batch, other: Batch) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for key in one.tensors:
        assert one.tensors[key].dtype == other.tensors[key].dtype
        assert torch.equal(one.tensors[key], other.tensors[key]), key
    assert one.objects == other.objects
    assert one.meta == other.meta


@given(rows=st.integers(0, 9), n=st.integers(1, 12))
def test_chunk_then_concat_is_identity(rows: int, n: int) -> None:
    # Mutation: drop `min(part, larger)` from the starts: rows are lost.
    batch = make(rows)
    chunks = batch.chunk(n)
    sizes = [len(chunk) for chunk in chunks]
    assert len(chunks) == n
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert_equal(concat(chunks), batch)


@given(lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=4))
def test_concat_pads_on_the_right_and_keeps_order(lengths: list[tuple[int, int]]) -> None:
    # Mutation: pad on the left, or with ones: the values or the zeros are elsewhere.
    parts = [make(rows, tokens, offset=10 * number) for number, (rows, tokens) in enumerate(lengths)]
    whole = concat(parts)
    longest = max(tokens for _, tokens in lengths)
    assert len(whole) == sum(rows for rows, _ in lengths)
    row = 0
    for part, (rows, tokens) in zip(parts, lengths, strict=True):
        ids, mask = whole.tensors["input_ids"][row : row + rows], whole.tensors["response_mask"][row : row + rows]
        assert ids.shape == (rows, longest)
        assert torch.equal(ids[:, :tokens], part.tensors["input_ids"])
        assert not ids[:, tokens:].any()
        assert mask.dtype == torch.bool
        assert not mask[:, tokens:].any()
        assert whole.objects["sample_id"][row : row + rows] == part.objects["sample_id"]
        row += rows


def test_concat_refuses_what_does_not_fit() -> None:
    one, other = make(2), make(1)
    with pytest.raises(ValueError, match="at least one"):
        concat([])
    with pytest.raises(ValueError, match="batch 1 and batch 0 do not both have rewards"):
        concat([one, other.select(["input_ids", "response_mask", "logits", "sample_id"])])
    with pytest.raises(ValueError, match="rewards differs in type"):  # Mutation: leave the check out; torch promotes to float64.
        concat([one, other.with_tensors(rewards=torch.zeros(1, dtype=torch.float64))])
    with pytest.raises(ValueError, match="meta 'step'"):
        concat([one, Batch(tensors=other.tensors, objects=other.objects, meta={"step": 8})])


@given(n=st.integers(1, 4))
def test_repeat_is_interleaved(n: int) -> None:
    # Mutation: `repeat` for `repeat_interleave`: a, b, a, b.
    repeated = make(3).repeat(n)
    assert repeated.tensors["rewards"].tolist() == [float(row) for row in range(3) for _ in range(n)]
    assert repeated.objects["sample_id"] == [f"s{row}" for row in range(3) for _ in range(n)]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (torch.tensor([2, 0, 2]), [2, 0, 2]),
        (torch.tensor([False, True, False, True]), [1, 3]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        (torch.tensor([], dtype=torch.int64), []),
    ],
)
def test_rows(index: torch.Tensor | slice, expected: list[int]) -> None:
    chosen = make(4).rows(index)
    assert chosen.tensors["rewards"].tolist() == expected
    assert chosen.objects["sample_id"] == [f"s{row}" for row in expected]
    assert chosen.meta == {"step": 7}


def test_a_chunk_is_pickled_without_the_rest() -> None:
    # Mutation: index tensors with the slice itself: each chunk is a view that drags the whole storage along.
    batch = Batch(tensors={"values": torch.zeros(1000, 100)})
    assert len(pickle.dumps(batch.chunk(10)[0])) < batch.nbytes / 5
    assert_equal(pickle.loads(pickle.dumps(make(2))), make(2))


def test_join_merges_columns_and_refuses_conflicts() -> None:
    batch = make(2)
    joined = join(batch.select(["input_ids"]), batch.select(["input_ids", "rewards", "sample_id"]))
    assert_equal(joined, batch.select(["input_ids", "rewards", "sample_id"]))
    # Mutation: let the later value win: nothing is raised.
    with pytest.raises(ValueError, match="disagree about tensor 'rewards'"):
        join(batch, Batch(tensors={"rewards": torch.tensor([0.0, 2.0])}))
    with pytest.raises(ValueError, match="disagree about tensor 'rewards'"):
        join(batch, Batch(tensors={"rewards": torch.tensor([0, 1])}))
    with pytest.raises(ValueError, match="disagree about object 'sample_id'"):
        join(batch, Batch(objects={"sample_id": ["s0", "x"]}))
    with pytest.raises(ValueError, match="disagree about meta 'step'"):
        join(batch, Batch(meta={"step": 8}))
    with pytest.raises(ValueError, match="differ in rows"):
        join(batch, Batch(tensors={"group": torch.zeros(3)}))


def test_columns_must_fit_together() -> None:
    with pytest.raises(ValueError, match=r"differ in rows: a 2, b 3"):
        Batch(tensors={"a": torch.zeros(2)}, objects={"b": [1, 2, 3]})
    with pytest.raises(ValueError, match="differ in tokens"):  # Mutation: leave out the check; a log-prob then meets another token.
        Batch(tensors={"a": torch.zeros(2, 4), "b": torch.zeros(2, 5)})
    with pytest.raises(ValueError, match="scalars go into meta"):
        Batch(tensors={"a": torch.tensor(1.0)})
    with pytest.raises(ValueError, match="occur twice: a"):
        Batch(tensors={"a": torch.zeros(1)}, meta={"a": 1})


def test_select_with_tensors_and_size() -> None:
    batch = make(2)
    with pytest.raises(KeyError, match="batch has no advantages"):
        batch.select(["advantages"])
    grown = batch.with_tensors(advantages=torch.ones(2, 3))
    assert "advantages" not in batch.tensors
    assert len(grown) == 2
    assert len(Batch()) == 0
    # int64 [2, 3] + bool [2, 3] + float32 [2, 3, 2] + float32 [2]
    assert batch.nbytes == 48 + 6 + 48 + 8
    with pytest.raises(ValueError, match="at least one chunk"):
        batch.chunk(0)

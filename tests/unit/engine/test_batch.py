"""Batch: strict about its columns, and the same rows after every cutting and joining."""

import pickle
from collections.abc import Callable
from typing import Any

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


@given(n=st.integers(0, 4))
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


def test_rows_that_are_not_there_are_refused() -> None:
    batch = make(4)
    assert batch.rows(torch.tensor([-1, 0])).tensors["rewards"].tolist() == [3.0, 0.0]
    with pytest.raises(IndexError):
        batch.rows(torch.tensor([4]))
    with pytest.raises(IndexError):
        batch.rows(torch.tensor([-5]))
    with pytest.raises(IndexError, match="mask"):  # Mutation: leave the check out: a short mask chooses among the first rows, without a word.
        batch.rows(torch.tensor([True]))


@given(order=st.permutations(range(5)), kind=st.sampled_from([list, torch.tensor, lambda order: torch.tensor(order, dtype=torch.int32)]))
def test_reorder_and_back(order: list[int], kind: Callable[[list[int]], Any]) -> None:
    # Mutation: order objects by the inverse.
    reordered = make(5).reorder(kind(order))
    assert reordered.tensors["rewards"].tolist() == [float(row) for row in order]
    assert reordered.objects["sample_id"] == [f"s{row}" for row in order]
    assert_equal(reordered.reorder(torch.tensor(order).argsort()), make(5))


@pytest.mark.parametrize(
    "order", [[0, 1], [0, 1, 2, 2], [0, 1, 1], [0, 1, 3], [-1, 0, 1], [], [0.0, 1.0, 2.0], [True, True, True], torch.zeros(3, 1, dtype=torch.int64)]
)
def test_reorder_refuses_what_loses_rows(order: list[int]) -> None:
    # Mutation: leave out any part of the check: a row is lost or doubled, or -1 is taken for the last.
    with pytest.raises(ValueError, match="each of the 3 rows exactly once"):
        make(3).reorder(order)


def test_a_mask_is_no_order() -> None:
    with pytest.raises(ValueError, match="each of the 2 rows"):  # Mutation: leave out the check of the type: False, True are 0, 1.
        make(2).reorder([False, True])


def test_nothing_can_be_reordered() -> None:
    assert len(make(0).reorder([])) == 0
    assert len(Batch().reorder([])) == 0


@given(rows=st.integers(0, 4), tokens=st.integers(0, 4), wider=st.integers(0, 4))
def test_padded_to_and_back(rows: int, tokens: int, wider: int) -> None:
    # Mutation: pad on the left; leave new memory as it is found; pad what has no tokens.
    batch = make(rows, tokens)
    padded = batch.padded_to(tokens + wider)
    for key, tensor in batch.tensors.items():
        if tensor.dim() > 1:
            assert padded.tensors[key].shape == (rows, tokens + wider, *tensor.shape[2:])
            assert not padded.tensors[key][:, tokens:].any()
    assert_equal(padded.padded_to(tokens), batch)


def test_padded_to_cuts_no_token() -> None:
    with pytest.raises(ValueError, match="input_ids is not all zeros beyond 2 of its 3 tokens"):  # Mutation: cut without looking.
        make(2).padded_to(2)
    with pytest.raises(ValueError, match="0 or more"):
        make(2).padded_to(-1)


def stored(batch: Batch, protocol: int, shared: bool) -> tuple[bytes, list[bytes]]:
    """The stream, and what goes beside it: with `shared` every buffer, into memory that cannot be written to, as in Ray's store."""
    if not shared:
        return pickle.dumps(batch, protocol), []
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(batch, 5, buffer_callback=buffers.append)
    return stream, [bytes(buffer) for buffer in buffers]


@pytest.mark.parametrize(("protocol", "shared"), [(2, False), (4, False), (5, False), (5, True)])
@given(rows=st.integers(0, 3), tokens=st.integers(0, 3))
def test_pickled_batches_are_equal(protocol: int, shared: bool, rows: int, tokens: int) -> None:
    # Mutation: drop `.contiguous()`, or `.view(dtype)`: the first two columns below do not come back.
    values = torch.arange(rows * tokens * 2.0).reshape(rows, tokens, 2)
    batch = make(rows, tokens).with_tensors(
        turned=values.transpose(1, 2).reshape(rows, 2, tokens).transpose(1, 2),
        half=values.bfloat16(),
        wide=torch.tensor([[1.5]]).expand(rows, tokens),
        weight=torch.ones(rows, requires_grad=True),
        complex=torch.ones(rows, dtype=torch.complex64),
    )
    stream, buffers = stored(batch, protocol, shared)
    received = pickle.loads(stream, buffers=buffers)
    assert_equal(received, batch)
    assert received.tensors["weight"].requires_grad
    # Mutation: drop the copy of what is read-only: a write would reach every process that reads the same memory.
    for tensor in received.tensors.values():
        with torch.no_grad():
            tensor.zero_()
    assert_equal(pickle.loads(stream, buffers=buffers), batch)


def test_views_are_pickled_without_the_rest() -> None:
    # Mutation: leave tensors to PyTorch in `_packed`: each chunk drags the memory of all along.
    batch = Batch(tensors={"values": torch.zeros(1000, 100), "weight": torch.zeros(1000, 100, requires_grad=True)})
    for part in (batch.chunk(10)[3], batch.rows(slice(300, 400))):
        stream = pickle.dumps(part, 5)
        assert len(stream) < batch.nbytes / 9
        assert_equal(pickle.loads(stream), part)


def test_large_tensors_travel_beside_the_stream() -> None:
    # Mutation: `tobytes()` in `_packed`, or no `.contiguous()`: every byte is copied into the stream, and from there into Ray's store.
    batch = Batch(tensors={"values": torch.arange(10_000.0).reshape(100, 100)})
    narrow = Batch(tensors={"values": torch.ones(100, 200)[:, :100]})
    assert [len(buffer) for buffer in stored(narrow, 5, shared=True)[1]] == [40_000]
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(batch, 5, buffer_callback=buffers.append)
    assert len(stream) < 1000
    (buffer,) = buffers
    batch.tensors["values"][0, 0] = 7.0  # the very memory of the tensor
    assert torch.frombuffer(buffer, dtype=torch.float32)[0] == 7.0


def test_consecutive_rows_are_views() -> None:
    # Mutation: copy them; a mini-batch then costs its memory once more.
    batch = make(6)
    for part in (batch.chunk(2)[1], batch.rows(slice(3, 6))):
        assert part.tensors["rewards"].data_ptr() == batch.tensors["rewards"][3:].data_ptr()
    assert batch.rows(slice(None, None, 2)).tensors["rewards"].data_ptr() != batch.tensors["rewards"].data_ptr()


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

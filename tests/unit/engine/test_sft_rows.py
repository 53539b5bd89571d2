"""Which conversations an SFT step takes, and how they become a batch."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.tokenizer import character_tokenizer
from engine.trainer.sft import _rendered, epoch_rows
from engine.workers.columns import conversations


# Mutations: a new order at every step (rows come twice in an epoch); `order` kept across the end of an epoch; `step * rows_per_step` (skips some).
@given(rows=st.integers(1, 12), rows_per_step=st.integers(1, 30), seed=st.integers(0, 2**31 - 1))
def test_every_epoch_visits_every_row_once(rows: int, rows_per_step: int, seed: int) -> None:
    steps = -(-3 * rows // rows_per_step)
    stream = [row for step in range(1, steps + 1) for row in epoch_rows(rows, rows_per_step, step, seed)]
    assert len(stream) == steps * rows_per_step
    for epoch in range(3):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@given(step=st.integers(1, 50), seed=st.integers(0, 100))
def test_a_step_is_a_function_of_seed_and_step(step: int, seed: int) -> None:
    # Whatever was asked before: a resumed run continues exactly.
    expected = epoch_rows(40, 16, step, seed)
    epoch_rows(40, 16, step + 1, seed + 1)
    assert epoch_rows(40, 16, step, seed) == expected


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [epoch_rows(40, 40, step, seed) for step in (1, 2) for seed in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_rows_become_token_tensors() -> None:
    batch = conversations([([5, 6, 7], [False, True, True]), ([8], [False]), ([9, 0], [True, True])])
    assert batch.tensors["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0], [9, 0, 0]]
    # By length, not by what the padding looks like: the last row's token 0 is a token. Mutation: `input_ids != 0`.
    assert batch.tensors["attention_mask"].tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    assert batch.tensors["response_mask"].tolist() == [[False, True, True], [False, False, False], [True, True, False]]
    assert batch.tensors["response_mask"].dtype is torch.bool


def test_conversations_that_do_not_fit_are_left_out() -> None:
    tokenizer = character_tokenizer(64)
    short, long = ([{"role": "user", "content": "1+1"}, {"role": "assistant", "content": answer}] for answer in ("2", "2" * 40))
    assert len(_rendered(tokenizer, [short, long, short], 20)) == 2
    with pytest.raises(ValueError, match=r"none of 1 conversations fits max_tokens=20; the shortest has 49"):
        _rendered(tokenizer, [long], 20)


def test_the_controller_does_without_vllm() -> None:
    # Seconds of import and a gigabyte, in the one process that generates nothing. Mutation: import the rollout at the top of actor.py.
    assert "engine.workers.actor" in sys.modules
    assert "vllm" not in sys.modules

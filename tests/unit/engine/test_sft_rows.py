"""Which conversations an SFT step takes, and how they become a batch."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import OptimizerConfig, SFTStageConfig, StageTrainingConfig
from engine.tokenizer import character_tokenizer
from engine.trainer.sft import epoch_rows, rendered, split
from engine.workers.columns import conversations

TRAINING = StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-3))


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


def chats(*answers: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": "1+1"}, {"role": "assistant", "content": answer}] for answer in answers]


def test_conversations_that_do_not_fit_are_left_out_and_counted() -> None:
    tokenizer = character_tokenizer(64)
    short, long = chats("2", "2" * 40)
    rows, too_long = rendered(tokenizer, [short, long, short], 20)
    assert (len(rows), too_long) == (2, 1)
    with pytest.raises(ValueError, match=r"none of 1 conversations fits max_tokens=20; the shortest has 49"):
        rendered(tokenizer, [long], 20)


def test_a_conversation_that_cannot_be_rendered_is_named() -> None:
    # Mutation: let the tokenizer's error go on as it is.
    tokenizer = character_tokenizer(64)
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + tokenizer.chat_template
    with pytest.raises(
        ValueError, match=r"conversation 1 \(from 0\) that begins 'Add.': the chat template refuses .* system, user, assistant: no system"
    ):
        rendered(tokenizer, [*chats("2"), [{"role": "system", "content": "Add."}, *chats("2")[0]]], 40)


# Mutations: steps rounded down, which leaves rows out; a last step that goes on into an epoch more.
@given(rows=st.integers(1, 12), rows_per_step=st.integers(1, 30), epochs=st.integers(1, 4), seed=st.integers(0, 100))
def test_so_many_epochs_visit_every_row_so_often(rows: int, rows_per_step: int, epochs: int, seed: int) -> None:
    stage = SFTStageConfig(kind="sft", epochs=epochs, rows_per_step=rows_per_step, training=TRAINING)
    by_step = [epoch_rows(rows, rows_per_step, step, seed, epochs) for step in range(1, stage.total_steps(rows) + 1)]
    assert all(by_step)
    assert all(len(chosen) == rows_per_step for chosen in by_step[:-1])
    assert sorted(row for chosen in by_step for row in chosen) == sorted(list(range(rows)) * epochs)
    # Of the same seed, the steps of a stage of so many steps begin alike.
    assert by_step[0] == epoch_rows(rows, rows_per_step, 1, seed)[: len(by_step[0])]


def test_a_number_of_steps_is_what_it_says() -> None:
    assert SFTStageConfig(kind="sft", steps=7, rows_per_step=3, training=TRAINING).total_steps(100) == 7


# Mutation: hold out by position, or by a generator of the seed: a file in another order would mix what was seen with what was not.
@given(st.permutations(range(40)), st.sampled_from([0.01, 0.25, 0.5]))
def test_what_is_held_out_depends_on_the_conversations_alone(order: list[int], fraction: float) -> None:
    made = chats(*map(str, range(40)))
    taught, held_out = split([made[row] for row in order], fraction)
    assert len(held_out) == max(1, round(40 * fraction))
    assert sorted(map(str, taught + held_out)) == sorted(map(str, made))
    assert sorted(map(str, held_out)) == sorted(map(str, split(made, fraction)[1]))


def test_nothing_is_held_out_of_nothing() -> None:
    assert split(chats("2", "3"), 0.0) == (chats("2", "3"), [])
    with pytest.raises(ValueError, match="1 conversations are too few to hold 1 of them out"):
        split(chats("2"), 0.5)


def test_the_controller_does_without_vllm() -> None:
    # Seconds of import and a gigabyte, in the one process that generates nothing. Mutation: import the rollout at the top of actor.py.
    code = "import sys, engine.trainer.session; print('engine.workers.actor' in sys.modules, 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["True", "False"]

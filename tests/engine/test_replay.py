"""One operator of a kept step, alone, gives what it gave: bit by bit, whatever the workers did since."""

from pathlib import Path
from typing import Any

import pytest
import torch
from probe import restore
from toy import prompt

from engine.batch import Batch
from engine.config import OptimizerConfig, RewardConfig, RLStageConfig, StageTrainingConfig
from engine.metrics import Mean, Statistics
from engine.trainer.replay import Difference, KeptOperation, differences, kept_operations, kept_steps, replay, step_directory
from engine.trainer.session import Session
from engine.trainer.sync import train_rl

PROMPTS = [prompt(f"{a}+{b}", index=3 * a + b, answer=str(1 + (a + b) % 3)) for a in range(3) for b in range(3)]
STAGE = RLStageConfig(
    kind="rl",
    steps=3,
    prompts_per_step=4,
    samples_per_prompt=4,
    updates_per_step=2,
    max_prompt_tokens=32,
    max_response_tokens=8,
    keep_calls_every_steps=2,
    reward=RewardConfig(default="exact_match"),
    training=StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-2), max_tokens_per_micro_batch=64),
)


@pytest.fixture(scope="module")
def kept(_taught: Session) -> Session:
    """The shared session after a run that kept its calls, with its stage begun anew."""
    _taught.actor.apply(restore).get()
    _taught.actor.synchronise().get()
    events: list[Any] = []
    train_rl(_taught, "replayed", STAGE, PROMPTS, 0, events.append)
    _taught.begin_stage(STAGE)
    return _taught


def operations(session: Session, step: int) -> tuple[Path, dict[str, KeptOperation]]:
    directory = step_directory(session.directory, "replayed", step)
    return directory, {str(operation): operation for operation in kept_operations(directory)}


def test_the_first_the_last_and_every_second_step_are_kept(kept: Session) -> None:
    assert [found for found in kept_steps(kept.directory) if found[0] == "replayed"] == [("replayed", 1), ("replayed", 2), ("replayed", 3)]
    _, there = operations(kept, 2)
    loop = ["generate", "lengths", "log_prob", "advantage", "measure", "agreement", "update", "synchronise"]
    assert {f"actor.{name}" for name in loop} | {"reward.score"} <= set(there)


# Mutations: state saved after the step instead of before it; the optimizer left out of the state (update); no `synchronise` before generate.
@pytest.mark.parametrize("name", ["generate", "lengths", "log_prob", "advantage", "measure", "agreement", "update"])
def test_an_operator_gives_what_it_gave(kept: Session, name: str) -> None:
    directory, there = operations(kept, 2)
    found = replay(kept, directory, there[f"actor.{name}"])
    assert found
    assert {difference.column: difference.largest for difference in found if difference.largest} == {}


def test_rewards_too(kept: Session) -> None:
    directory, there = operations(kept, 3)
    columns = ("reward", "outcome", "reward_status", "reward_parts", "reward_reason")
    found = replay(kept, directory, there["reward.score"])
    assert [(difference.rank, difference.column, difference.largest) for difference in found] == [
        (rank, name, 0.0) for rank in (0, 1) for name in columns
    ]


def test_other_weights_are_seen(kept: Session) -> None:
    # The input of step 3 on the state of step 1. Mutation: replay on the weights that happen to be there.
    directory, _ = operations(kept, 1)
    _, there = operations(kept, 3)
    assert max(difference.largest for difference in replay(kept, directory, there["actor.log_prob"])) > 1e-3


def test_differences_name_the_column() -> None:
    one = Batch(tensors={"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1, 2])}, objects={"text": ["x", "y"]})
    other = Batch(tensors={"a": torch.tensor([1.0, 2.5]), "b": torch.tensor([1.0, 2.0])}, objects={"text": ["x", "y"]})
    assert list(differences(1, one, other)) == [Difference(1, "a", 0.5), Difference(1, "b", float("inf")), Difference(1, "text", 0.0)]
    assert list(differences(0, Statistics({"m": Mean(3.0, 2)}), Statistics({"m": Mean(4.0, 2)}))) == [Difference(0, "m", 0.5)]
    assert list(differences(0, [1, 2], [1, 3])) == [Difference(0, "result", float("inf"))]
    nan = Batch(tensors={"a": torch.tensor([float("nan")])})
    # Mutation: NaN compared with `max`, which says that nothing differs.
    assert list(differences(0, nan, Batch(tensors={"a": torch.tensor([1.0])}))) == [Difference(0, "a", float("inf"))]

"""Supervised fine-tuning on two ranks: packed rows, epochs, and a validation that changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from probe import restore, weights
from toy import CONVERSATIONS
from transformers import AutoModelForCausalLM

from engine.config import OptimizerConfig, SFTStageConfig, SFTValidationConfig, StageTrainingConfig
from engine.events import StageStarted, StepFinished
from engine.tokenizer import render_conversation
from engine.trainer.session import Session
from engine.trainer.sft import Conversation, split, train_sft

# Of different lengths, with answers of different lengths, some with two.
CHATS: list[Conversation] = [[chat[0] | {"content": chat[0]["content"] + "+1" * (row % 4)}, *chat[1:]] for row, chat in enumerate(CONVERSATIONS[:21])]
CHATS[3] = [*CHATS[3], {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes, quite"}]


def run(session: Session, learning_rate: float = 1e-2, schedule: str = "constant", **settings: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Events of a stage from the taught weights on, and the weights that it leaves."""
    events: list[Any] = []
    session.actor.apply(restore).get()
    # Passes of few tokens, so that each rank packs several rows into several of them.
    optimizer = OptimizerConfig.model_validate({"learning_rate": learning_rate, "schedule": schedule})
    training = StageTrainingConfig(optimizer=optimizer, max_tokens_per_micro_batch=48)
    config = SFTStageConfig.model_validate({"kind": "sft", "rows_per_step": 8, "training": training, **settings})
    train_sft(session, "sft", config, CHATS, 0, events.append)
    return events, weights(session)


def metrics(events: list[Any]) -> list[dict[str, float]]:
    return [event.metrics for event in events if isinstance(event, StepFinished)]


def likelihood(model: Any, session: Session, chats: list[Conversation]) -> float:
    """Mean negative log-likelihood of all answers' tokens, by plain transformers, one conversation at a time."""
    total, tokens = 0.0, 0
    for chat in chats:
        ((ids, mask),) = render_conversation(session.tokenizer, chat)
        with torch.no_grad():
            log_probs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        of_tokens = log_probs[:-1].gather(1, torch.tensor(ids)[1:, None]).squeeze(1)
        total -= float(of_tokens[torch.tensor(mask)[1:]].sum())
        tokens += sum(mask)
    return total / tokens


def test_the_loss_of_packed_rows_is_that_of_transformers(session: Session, tmp_path: Path) -> None:
    # All 21 rows in one step, eleven on one rank. Mutations: a mean of means over ranks or passes; rows that see what they are packed with.
    model = AutoModelForCausalLM.from_pretrained(session.export(tmp_path / "model"), dtype=torch.float32)
    events, _ = run(session, learning_rate=0.0, epochs=1, rows_per_step=21)
    (found,) = metrics(events)
    # Rows that see each other change it by 1.5e-5: the toy hardly looks back.
    assert found["sft/loss"] == pytest.approx(likelihood(model, session, CHATS), rel=1e-6)


def test_epochs(session: Session) -> None:
    # 42 visits in steps of 8: five whole ones and one of two rows, one a rank.
    events, after = run(session, epochs=2)
    (started,) = [event for event in events if isinstance(event, StageStarted)]
    assert started.steps == len(metrics(events)) == 6
    # The same updates as of so many steps, but for the last.
    _, five = run(session, steps=5)
    of_steps, six = run(session, steps=6)
    assert [found["sft/loss"] for found in metrics(events)[:5]] == [found["sft/loss"] for found in metrics(of_steps)[:5]]
    assert not all(torch.equal(after[name], tensor) for name, tensor in five.items())
    assert not all(torch.equal(after[name], tensor) for name, tensor in six.items())
    # Mutation: a schedule over another number of steps.
    falling, _ = run(session, schedule="linear", epochs=2)
    assert [found["policy/learning_rate"] for found in metrics(falling)] == pytest.approx([1e-2 * (1 - step / 6) for step in range(6)])


def test_validation_is_on_what_is_not_trained_on_and_changes_nothing(session: Session, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 4}
    often, after = run(session, **settings, validation=SFTValidationConfig(every_steps=1, held_out_fraction=0.3))
    rarely, also = run(session, **settings, validation=SFTValidationConfig(every_steps=9, held_out_fraction=0.3))
    # Mutation: a validation that steps. Gradients that it left behind would do no harm: every step begins without any.
    assert all(torch.equal(also[name], tensor) for name, tensor in after.items())
    losses = [found.get("sft/validation_loss") for found in metrics(often)]
    assert None not in losses
    assert [found.get("sft/validation_loss") for found in metrics(rarely)] == [None, None, None, losses[-1]]
    model = AutoModelForCausalLM.from_pretrained(session.export(tmp_path / "model"), dtype=torch.float32)
    taught, held_out = split(CHATS, 0.3)
    assert (len(taught), len(held_out)) == (15, 6)
    # Over tokens, not over rows or ranks.
    assert losses[-1] == pytest.approx(likelihood(model, session, held_out), rel=1e-5)


def test_rows_that_are_too_long_are_counted(session: Session) -> None:
    events, _ = run(session, steps=2, max_tokens=24)
    lengths = [len(render_conversation(session.tokenizer, chat)[0][0]) for chat in CHATS]
    first, second = metrics(events)
    assert first["data/too_long_rows"] == sum(length > 24 for length in lengths) > 0
    assert "data/too_long_rows" not in second

"""YaRN in both engines alike, in the phases that ask for it, and nowhere else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from probe import extend_the_trainer_again, leave_the_trainer_plain
from toy import ARCHITECTURE, prompt

from engine.batch import Batch
from engine.config import (
    EngineConfig,
    EvaluationConfig,
    LengthExtensionConfig,
    OptimizerConfig,
    RewardConfig,
    RLStageConfig,
    SamplingConfig,
    StageTrainingConfig,
)
from engine.events import StepFinished
from engine.rollout.plan import SamplePlan
from engine.trainer.evaluation import evaluate
from engine.trainer.session import Session
from engine.trainer.sync import DisagreementError, train_rl

PROMPTS = [prompt(f"{a}+{b}" + "+1" * (3 * a), index=2 * a + b, answer="1") for a in range(3) for b in range(2)]
REWARD = RewardConfig(default="exact_match")
# Of a model whose frequencies had been trained for 16 tokens: what it says of a prompt of ten tokens is changed.
YARN = LengthExtensionConfig(factor=4, attention_factor=1.0, original_max_context_tokens=16)
PLAN = SamplePlan("questions", tuple(range(len(PROMPTS))), 1, SamplingConfig(), 12, 7, "test", 0, greedy_first=True)
BOUND = 1e-4
"""nats. Both engines compute in float32."""


def stage(extension: LengthExtensionConfig | None, **changes: Any) -> RLStageConfig:
    training = StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-3))
    plain = {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4, "max_prompt_tokens": 32, "max_response_tokens": 12}
    return RLStageConfig(kind="rl", length_extension=extension, reward=REWARD, training=training, **(plain | changes))


def differences(session: Session, config: RLStageConfig) -> list[float]:
    """Largest |trainer - rollout| log-prob of each step."""
    events: list[Any] = []
    train_rl(session, "rl", config, PROMPTS, 0, events.append)
    return [event.metrics["policy/max_log_prob_difference"] for event in events if isinstance(event, StepFinished)]


def greedy(session: Session, extension: LengthExtensionConfig | None = None) -> Batch:
    session.load_prompts("questions", PROMPTS)
    plan = SamplePlan(**{name: getattr(PLAN, name) for name in PLAN.__slots__} | {"length_extension": extension})
    return session.actor.generate(plan).get()


def log_probs(drawn: Batch) -> torch.Tensor:
    return drawn.tensors["rollout_log_probs"]


def test_both_engines_agree_in_a_stage_with_yarn_and_in_the_one_after_it(session: Session) -> None:
    # The second step comes after a synchronisation, which must leave the positions as they are.
    extended = differences(session, stage(YARN))
    assert len(extended) == 2
    assert max(extended) < BOUND
    # Mutation: the trainer stays extended.
    assert max(differences(session, stage(None))) < BOUND


def test_yarn_in_the_rollout_alone_stops_the_run(session: Session) -> None:
    session.actor.apply(leave_the_trainer_plain).get()
    try:
        with pytest.raises(DisagreementError):
            differences(session, stage(YARN))
    finally:
        session.actor.apply(extend_the_trainer_again).get()


def test_only_what_asks_for_it_is_generated_with_yarn(session: Session) -> None:
    before = greedy(session)
    extended = greedy(session, YARN)
    assert not torch.equal(log_probs(before), log_probs(extended))
    # Mutations: the tables stay; the prefix cache keeps keys of other positions.
    after = greedy(session)
    assert torch.equal(log_probs(before), log_probs(after))
    assert before.objects["response"] == after.objects["response"]
    assert torch.equal(log_probs(greedy(session, LengthExtensionConfig(factor=1))), log_probs(before))


def test_an_evaluation_has_its_own(session: Session) -> None:
    def scores(extension: LengthExtensionConfig | None) -> list[str]:
        config = EvaluationConfig(samples_per_prompt=2, max_response_tokens=12, length_extension=extension)
        return [row["response"] for row in evaluate(session, "base", config, REWARD, PROMPTS, 0, lambda event: None).rows]

    plain = scores(None)
    # Attention that looks everywhere alike, so that other answers come of it. Mutation: the setting does not reach the plan.
    assert scores(LengthExtensionConfig(factor=1, attention_factor=0.01)) != plain
    assert scores(None) == plain


def test_a_stage_with_yarn_goes_beyond_the_models_context(cluster: None, engine_config: EngineConfig, model_directory: Path, tmp_path: Path) -> None:
    """Of 256 tokens; vLLM refuses to start with more. Mutation: the engine starts with the model's own context."""
    context = ARCHITECTURE.max_context_tokens + 64
    changes = {"max_context_tokens": context, "resources": engine_config.resources.model_copy(update={"ranks": 1})}
    extension = LengthExtensionConfig(factor=1.5, attention_factor=1.0)
    config = stage(extension, steps=1, prompts_per_step=2, samples_per_prompt=2, max_response_tokens=context - 32)
    with Session.open(engine_config.model_copy(update=changes), model_directory, tmp_path) as session:
        events: list[Any] = []
        train_rl(session, "rl", config, PROMPTS, 0, events.append)
        (step,) = [event.metrics for event in events if isinstance(event, StepFinished)]
        assert step["policy/max_log_prob_difference"] < BOUND
        written = session.export(tmp_path / "model") / "config.json"
    # What is exported says what the model was made with.
    assert '"max_position_embeddings": 256' in written.read_text()
    assert "yarn" not in written.read_text()

"""An RL stage that ends before its last step, on real engines."""

from pathlib import Path
from typing import Any

import pytest
from toy import prompt

from engine.config import (
    CollapseConfig,
    ConvergenceConfig,
    EndsConfig,
    OptimizerConfig,
    RewardConfig,
    RLStageConfig,
    StageTrainingConfig,
)
from engine.events import SamplesGenerated, StageFinished, StageStarted, StepFinished
from engine.trainer.ends import CollapseError
from engine.trainer.session import Session
from engine.trainer.sync import train_rl

PROMPTS = [prompt(f"{a}+{b}", index=2 * a + b, answer=str(1 + (a + b) % 2)) for a in range(2) for b in range(2)]


def stage(steps: int, **ends: Any) -> RLStageConfig:
    return RLStageConfig(
        kind="rl",
        steps=steps,
        ends=EndsConfig(**ends),
        prompts_per_step=2,
        samples_per_prompt=4,
        max_prompt_tokens=32,
        max_response_tokens=8,
        reward=RewardConfig(default="exact_match"),
        training=StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-6)),
        samples_table_every_steps=100,
    )


def test_a_stage_ends_when_it_has_converged(session: Session) -> None:
    # Eight samples a step: a bound that any noise stays below, so that the window alone decides.
    events: list[Any] = []
    rule = ConvergenceConfig(window_steps=20, min_steps=21, max_reward_growth=10.0, max_length_growth=10.0)
    train_rl(session, "rl", stage(40, convergence=rule), PROMPTS, 0, events.append)
    started, finished = events[0], events[-1]
    assert isinstance(started, StageStarted)
    assert isinstance(finished, StageFinished)
    # Mutations: `steps` of the configuration in the event; the loop goes on.
    assert (started.steps, finished.steps, finished.ended_by) == (40, 21, "convergence")
    assert "over the last 20 steps reward/mean changes by" in finished.why
    steps = [event for event in events if isinstance(event, StepFinished)]
    assert [event.step for event in steps] == list(range(1, 22))
    assert [event.step for event in steps if "ends/reward_mean_slope_high" in event.metrics] == [20, 21]
    # The last step's samples are told, though nobody knew before that it would be the last.
    assert [event.step for event in events if isinstance(event, SamplesGenerated)] == [1, 21]


def test_a_stage_whose_policy_collapses_is_stopped_and_can_be_exported(session: Session, tmp_path: Path) -> None:
    # Four samples of two possible answers: most have a twin.
    events: list[Any] = []
    rule = CollapseConfig(patience_steps=3, max_duplicate_share=0.1)
    with pytest.raises(
        CollapseError, match=r"stage rl has collapsed, and was stopped after step 3 of 40: response/duplicate_share has been above 0\.1"
    ):
        train_rl(session, "rl", stage(40, collapse=rule), PROMPTS, 0, events.append)
    shares = [event.metrics["response/duplicate_share"] for event in events if isinstance(event, StepFinished)]
    assert len(shares) == 3
    assert all(0.5 <= share <= 1 for share in shares)
    assert not any(isinstance(event, StageFinished) for event in events)
    assert (session.export(tmp_path / "model") / "model.safetensors").is_file()

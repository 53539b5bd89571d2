"""When an RL stage ends: convergence and collapse, on planted histories."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.algorithms.step import duplicates
from engine.config import CollapseConfig, ConvergenceConfig, EndsConfig, OptimizerConfig, RLStageConfig, StageTrainingConfig
from engine.trainer.ends import collapsed, converged, ended, progress, trends

WINDOW = 40
RULE = ConvergenceConfig(window_steps=WINDOW, min_steps=WINDOW, max_reward_growth=2e-3, max_length_growth=2e-3)


def stage(steps: int = 100, **ends: Any) -> RLStageConfig:
    training = StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-4))
    common = {"prompts_per_step": 4, "max_prompt_tokens": 8, "max_response_tokens": 8, "training": training}
    return RLStageConfig(kind="rl", steps=steps, ends=EndsConfig(**ends), **common)  # type: ignore[arg-type]


def history(reward: Any, length: Any = 50.0, **more: Any) -> list[dict[str, float]]:
    """Metrics of as many steps as `reward` has; numbers stand for a constant."""
    columns = {"reward/mean": reward, "response/tokens_mean": length, **{name.replace("__", "/"): value for name, value in more.items()}}
    steps = len(reward)
    return [{name: float(np.broadcast_to(value, steps)[step]) for name, value in columns.items()} for step in range(steps)]


def first_end(steps: list[dict[str, float]], rule: ConvergenceConfig) -> int | None:
    return next((number for number in range(1, len(steps) + 1) if converged(steps[:number], rule)), None)


def test_the_line_and_its_interval_by_hand() -> None:
    """Twenty steps of 0, 1, 0, 1, ... at x = -9.5 ... 9.5: S = 20 (400 - 1) / 12 = 665; sum x y = sum of the ten odd places = 5, so b = 5 / 665.

    Sum (y - 1/2)^2 = 5, of which the line takes b^2 S = 25 / 665; s = sqrt((5 - 25 / 665) / 18 / 665) = 0.0203603; z(0.9) = 1.2815516.
    """
    rule = ConvergenceConfig(window_steps=20, min_steps=20, confidence=0.9, max_reward_growth=0.1)
    reward, length = trends(history([0, 1] * 10, 7.0), rule)
    assert reward.slope == pytest.approx(5 / 665)
    # Mutation: n in place of n - 2 gives 0.0193154 for s.
    assert reward.high == pytest.approx(5 / 665 + 1.2815516 * 0.0203603, abs=1e-6)
    assert reward.bound == pytest.approx(0.1 * 0.5)
    assert (length.slope, length.high, length.bound) == (pytest.approx(0), pytest.approx(0), pytest.approx(7e-3))
    assert trends(history([0.0] * 19), rule) == []


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(2.5, 20.0), st.floats(0.0, 0.03), st.sampled_from(["reward", "length"]))
def test_what_rises_by_several_times_the_bound_has_not_converged(seed: int, times: float, noise: float, metric: str) -> None:
    """A line from 0.4 on that rises by 2.5 to 20 times what counts as nothing, under noise of any size that steps have; the other metric is flat.

    Mutation: `high` without its interval ends some of these; `any` for `all` ends all.
    """
    draws = np.random.default_rng(seed).normal(size=(2, 80))
    rising = 0.4 * (1 + times * 2e-3 * np.arange(80)) + noise * 0.4 * draws[0]
    flat = 0.4 + 1e-6 * draws[1]
    reward, length = (rising, 100 * flat) if metric == "reward" else (flat, 100 * rising)
    assert first_end(history(reward, length), RULE) is None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.0, 0.02), st.integers(0, 60))
def test_a_plateau_is_found_within_two_windows(seed: int, noise: float, rise: int) -> None:
    """After a rise of so many steps; noise of a step up to 2 % of the mean.

    Of 40 steps, s = noise * sqrt(12 / 40^3) = 2.7e-4 of the mean; z s = 4.5e-4 is far below the bound of 2e-3. Mutation: the window from the start
    of the stage still holds the rise.
    """
    draws = np.random.default_rng(seed).normal(size=(2, rise + 2 * WINDOW))
    level = np.minimum(np.arange(rise + 2 * WINDOW) / max(rise, 1), 1)
    reward = 0.1 + 0.5 * level + noise * 0.6 * draws[0]
    found = first_end(history(reward, 40 * (1 + noise * draws[1])), RULE)
    assert found is not None
    assert found >= WINDOW


def test_a_rise_at_the_bound_is_taken_for_flat_as_seldom_as_said() -> None:
    """At one step, reward alone: 5 % of 4000 draws, s.d. 0.34 %, whatever the noise."""
    generator = np.random.default_rng(0)
    # The bound is a share of the mean of the window: 0.5 in the middle.
    line = 0.5 * (1 + 2e-3 * (np.arange(WINDOW) - (WINDOW - 1) / 2))
    for noise in (0.005, 0.05):
        flat = sum(trends(history(line + noise * draw), RULE)[0].flat for draw in generator.normal(size=(4000, WINDOW)))
        assert 0.035 <= flat / 4000 <= 0.07


def test_a_stage_that_has_converged_says_by_which_numbers() -> None:
    config = stage(convergence=RULE)
    steps = history([0.5] * WINDOW)
    assert ended(steps[:-1], config) is None
    end = ended(steps, config)
    assert end is not None
    assert end.by == "convergence"
    assert "last 40 steps" in end.why
    assert "reward/mean changes by +0 a step, at most +0 (allowed: 0.001)" in end.why
    # Mutation: min_steps is not looked at.
    assert ended(steps, stage(convergence=RULE.model_copy(update={"min_steps": WINDOW + 1}))) is None
    told = {f"ends/{name}_{what}" for name in ("reward_mean", "response_tokens_mean") for what in ("slope", "slope_high")}
    assert set(progress(steps, config)) == told
    assert progress(steps[:-1], config) == progress(steps, stage()) == {}


def test_without_rules_a_stage_ends_by_its_steps() -> None:
    assert ended(history([0.5] * 99), stage()) is None
    end = ended(history([0.5] * 100), stage())
    assert end is not None
    assert (end.by, end.why) == ("steps", "")


SOUND = {"policy__entropy": 0.5, "response__truncated_fraction": 0.05, "response__duplicate_share": 0.1}
BOUNDS = CollapseConfig(patience_steps=5, baseline_steps=4, min_entropy_nats=0.01, max_truncated_share=0.5, max_duplicate_share=0.8)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(5, 30),
    st.sampled_from(
        [
            ("policy/entropy", 0.049, "min_entropy_share=0.1"),
            ("policy/entropy", 0.009, "min_entropy_nats=0.01"),
            ("policy/entropy", math.nan, "min_entropy_nats=0.01"),
            ("response/tokens_mean", 9.9, "min_length_share=0.2"),
            ("response/truncated_fraction", 0.51, "max_truncated_share=0.5"),
            ("response/duplicate_share", 0.81, "max_duplicate_share=0.8"),
        ]
    ),
    st.booleans(),
)
def test_a_collapse_is_found_when_its_patience_is_over(begins: int, sign: tuple[str, float, str], breaks: bool) -> None:
    """Exactly `patience_steps` steps after it began, and not when one step in between was sound.

    Mutations: the bounds of shares look at a moving baseline; steps are counted without the break; > for >= in `passed`.
    """
    metric, value, setting = sign
    steps = history([0.5] * (begins + 5), **SOUND)
    for step in steps[begins:]:
        step[metric] = value
    if breaks:
        steps[begins + 2] = history([0.5], **SOUND)[0]
    assert [number for number in range(begins + 5) if collapsed(steps[:number], BOUNDS)] == []
    verdict = collapsed(steps, BOUNDS)
    if breaks:
        assert verdict is None
        return
    assert verdict is not None
    assert metric in verdict
    assert f"ends.collapse.{setting}" in verdict
    assert "for 5 steps" in verdict


@pytest.mark.parametrize(
    ("metric", "value"),
    [("policy/entropy", 0.05), ("response/tokens_mean", 10.0), ("response/truncated_fraction", 0.5), ("response/duplicate_share", 0.8)],
)
def test_a_value_on_its_bound_is_sound(metric: str, value: float) -> None:
    steps = history([0.5] * 30, **SOUND)
    for step in steps[10:]:
        step[metric] = value
    assert collapsed(steps, BOUNDS) is None


def test_the_entropy_is_that_at_temperature_1() -> None:
    # A policy that samples at 1.5 looks lively when it is not. Mutation: policy/entropy alone.
    steps = history([0.5] * 20, **SOUND | {"policy__entropy_temperature_1": [0.4] * 10 + [0.001] * 10})
    verdict = collapsed(steps, BOUNDS)
    assert verdict is not None
    assert verdict.startswith("policy/entropy_temperature_1 has been below 0.01")


def test_steps_without_the_metric_neither_count_nor_break() -> None:
    # A step that found no group to train on has no entropy.
    steps = history([0.5] * 20, **SOUND)
    for number, step in enumerate(steps[10:]):
        step["policy/entropy"] = 0.001
        if number % 2:
            del step["policy/entropy"]
    assert collapsed(steps[:19], BOUNDS) is not None
    assert collapsed(steps[:18], BOUNDS) is None


def test_a_policy_that_collapsed_has_not_converged() -> None:
    # Nothing changes any more. Mutation: convergence is asked first.
    config = stage(convergence=RULE, collapse=CollapseConfig(patience_steps=30))
    end = ended(history([0.5] * WINDOW, response__truncated_fraction=1.0, policy__entropy=1.0), config)
    assert end is not None
    assert end.by == "collapse"


@pytest.mark.parametrize(
    ("steps", "ends", "text"),
    [
        (40, {"convergence": RULE}, "ends.convergence looks at nothing before step 40"),
        (4, {"collapse": BOUNDS}, "ends.collapse.patience_steps"),
    ],
)
def test_rules_that_can_never_act_are_refused(steps: int, ends: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        stage(steps, **ends)


def test_a_collapse_without_bounds_is_refused() -> None:
    with pytest.raises(ValidationError, match="nothing is bounded; set one of min_entropy_nats"):
        CollapseConfig(min_entropy_share=None, min_length_share=None, max_truncated_share=None)


def test_twins_are_of_the_same_prompt() -> None:
    # Mutation: texts alone; the share of distinct ones.
    assert duplicates([1, 1, 1, 2, 2], ["a", "a", "b", "a", "c"]) == [True, True, False, False, False]

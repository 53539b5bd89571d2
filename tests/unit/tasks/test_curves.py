"""From an event log to curves, and from curves to a few numbers."""

import math

import numpy as np
import pytest

from engine.events import StageStarted, StepFinished
from engine.statistics import Interval
from tasks.accuracy import Accuracy
from tasks.curves import NOISE_STEPS, WINDOWS, curves, series, summary
from tasks.journal import EvaluationFinished


def evaluated(label: str, stage: str | None, mean: float) -> EvaluationFinished:
    interval = Interval(mean=mean, low=mean, high=mean)
    found = Accuracy(
        samples_per_prompt=8, prompts=4, average=interval, greedy=interval, average_by_difficulty={}, greedy_by_difficulty={}
    )  # fmt: skip
    return EvaluationFinished(label=label, stage=stage, trained_steps=0, accuracy=found, seconds=1.0, tokens=1, rows=[])


def test_a_log_gives_the_curves_of_each_stage() -> None:
    """Mutation: `step` instead of `step - 1`, or 0 for a step without the metric."""
    events = [
        evaluated("base", None, 0.1),
        StageStarted(stage="rl", kind="rl", steps=3),
        StepFinished(stage="rl", step=1, metrics={"reward/mean": 0.5, "timing/step_seconds": 9.0}),
        StepFinished(stage="rl", step=2, metrics={"reward/mean": math.nan, "policy/entropy": 2.0}),
        evaluated("rl", "rl", 0.4),
    ]
    found = curves(events)
    assert (found["rl"].steps, found["rl"].done) == (3, 2)
    np.testing.assert_array_equal(found["rl"].metrics["reward/mean"], [0.5, math.inf, math.nan])
    np.testing.assert_array_equal(found["rl"].metrics["policy/entropy"], [math.nan, 2.0, math.nan])
    assert found["base"].metrics["accuracy/average"].tolist() == [0.1]
    reduced = summary(found)
    # How fast the machine was is no matter of learning.
    assert set(reduced["rl"]) == {"reward/mean", "policy/entropy", "accuracy/average", "accuracy/greedy"}
    np.testing.assert_array_equal(reduced["rl"]["reward/mean"].windows, [0.5, math.inf, math.nan])
    assert reduced["rl"]["accuracy/average"].windows == [0.4]


def test_windows_are_means_of_consecutive_steps_and_only_whole_ones_count() -> None:
    """48 steps in 24 windows of two; 47 done leave the last one open. Mutation: `part[0]` instead of `part[-1]`."""
    values = np.arange(48, dtype=float)
    assert series(values, done=48).windows == [2 * number + 0.5 for number in range(WINDOWS)]
    short = series(np.where(values < 47, values, math.nan), done=47).windows
    assert short[:-1] == [2 * number + 0.5 for number in range(WINDOWS - 1)]
    assert math.isnan(short[-1])
    # Measured every other step only, as a validation is: the windows are there all the same.
    assert series(np.where(values % 2 == 1, values, math.nan), done=48).windows == [2 * number + 1 for number in range(WINDOWS)]


def test_noise_is_the_spread_of_the_differences() -> None:
    """0, 1, 0, 1, ...: as many differences of +1 as of -1 have a standard deviation of 1. A slope has none. Mutation: the values' own spread."""
    zigzag = np.arange(33) % 2
    assert series(zigzag.astype(float), done=33).noise == pytest.approx(0.0)
    assert math.isnan(series(np.arange(33, dtype=float), done=33).noise)
    assert math.isnan(series(zigzag[:NOISE_STEPS].astype(float), done=NOISE_STEPS).noise)

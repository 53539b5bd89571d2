"""What an evaluation says: accuracies with bootstrap intervals over prompts, over all and by difficulty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from engine.config import EvaluationConfig
from engine.statistics import Interval, accuracy_interval, paired_gain_interval
from tasks.record import BeforeAfter, StageRecord

if TYPE_CHECKING:  # the engine's trainer imports torch, which `almanac show` does not need
    from engine.trainer.evaluation import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Fractions of 1. avg@k is the mean score of k drawn responses to a prompt, greedy the score of the most likely one."""

    samples_per_prompt: int
    """k of avg@k."""
    prompts: int
    average: Interval
    greedy: Interval
    average_by_difficulty: Mapping[str, Interval]
    """In `difficulty_order`."""
    greedy_by_difficulty: Mapping[str, Interval]

    def metrics(self) -> dict[str, float]:
        """Names as in docs/tracking.md. MLflow refuses `@`: avg@8 is called avg_at_8."""
        average = f"avg_at_{self.samples_per_prompt}"
        values: dict[str, float] = {}
        for name, interval in ((average, self.average), ("greedy", self.greedy)):
            values |= {f"accuracy/{name}": interval.mean, f"accuracy/{name}_low": interval.low, f"accuracy/{name}_high": interval.high}
        for name, intervals in ((average, self.average_by_difficulty), ("greedy", self.greedy_by_difficulty)):
            values |= {f"accuracy_by_difficulty/{name}/{difficulty}": interval.mean for difficulty, interval in intervals.items()}
        return values


def described(summary: Accuracy) -> str:
    """Average accuracy and its interval, short enough for a line."""
    average = summary.average
    return f"avg@{summary.samples_per_prompt} {100 * average.mean:.1f} % [{100 * average.low:.1f}, {100 * average.high:.1f}]"


def difficulty_order(difficulty: str) -> tuple[bool, float, str]:
    """Sort key: numbers by value, before words by the alphabet."""
    try:
        return (False, float(difficulty), difficulty)
    except ValueError:
        return (True, 0.0, difficulty)


def accuracy(evaluation: Evaluation, config: EvaluationConfig, seed: int) -> Accuracy:
    """Summarises an evaluation; the same evaluation, configuration and seed give the same intervals."""

    def interval(scores: ArrayLike) -> Interval:
        return accuracy_interval(scores, config.bootstrap_resamples, config.confidence, seed)

    rows: dict[str, list[int]] = {}
    for row, difficulty in enumerate(evaluation.difficulties):
        rows.setdefault(difficulty, []).append(row)
    ordered = sorted(rows, key=difficulty_order)
    return Accuracy(
        samples_per_prompt=len(evaluation.samples[0]),
        prompts=len(evaluation.prompt_ids),
        average=interval(evaluation.samples),
        greedy=interval(evaluation.greedy),
        average_by_difficulty={name: interval([evaluation.samples[row] for row in rows[name]]) for name in ordered},
        greedy_by_difficulty={name: interval([evaluation.greedy[row] for row in rows[name]]) for name in ordered},
    )


def record_gain(stage: StageRecord, before: Evaluation, after: Evaluation, config: EvaluationConfig, seed: int) -> None:
    """Writes the evaluations around a stage, of the same prompts, into its record: accuracies, intervals and the paired gain."""
    first, last = accuracy(before, config, seed), accuracy(after, config, seed)
    gain = paired_gain_interval(before.samples, after.samples, config.bootstrap_resamples, config.confidence, seed)
    stage.samples_per_prompt, stage.confidence = last.samples_per_prompt, config.confidence
    stage.accuracy_before, stage.interval_before = first.average.mean, (first.average.low, first.average.high)
    stage.accuracy_after, stage.interval = last.average.mean, (last.average.low, last.average.high)
    stage.greedy_before, stage.greedy_after = first.greedy.mean, last.greedy.mean
    stage.gain, stage.gain_interval = gain.mean, (gain.low, gain.high)
    stage.by_difficulty = {
        name: BeforeAfter(before=first.average_by_difficulty[name].mean, after=last.average_by_difficulty[name].mean)
        for name in first.average_by_difficulty
    }

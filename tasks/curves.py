"""What a run measured, as curves, and each curve in a few numbers: the means of its windows and its noise, which is what runs are compared by."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from engine.events import StageStarted, StepFinished
from tasks.journal import EvaluationFinished, LoggedEvent
from tasks.progress import BASE

WINDOWS = 24
"""Of a curve, at most; a curve of fewer steps has one for each."""
ACCURACY = ("accuracy/average", "accuracy/greedy")
"""Of the evaluation after a stage, as curves of one value; avg@k goes by the name `average`, whatever k is."""
OF_THE_MACHINE = ("timing/", "throughput/", "sync/", "memory/", "health/")
"""Metrics that say how fast and how large, not what was learnt."""


@dataclass(slots=True)
class StageCurves:
    """All curves of one stage."""

    steps: int
    """Planned."""
    done: int = 0
    metrics: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """By name, [steps] (accuracies [1]): NaN where a step has no value, infinity where its value was not finite."""


class Series(BaseModel):
    """A curve in a few numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    windows: list[float]
    """Mean of each window of the planned steps, [windows]. NaN where not all its steps were done, infinity where a value was not finite."""
    noise: float
    """Logarithm of the standard deviation of the differences between consecutive steps; NaN where there are fewer than `NOISE_STEPS` of them."""


NOISE_STEPS = 16
"""With fewer differences, the logarithm of their spread is too skewed for a t-test."""

Summary = dict[str, dict[str, Series]]
"""A run by stage and metric."""


def curves(events: Iterable[LoggedEvent]) -> dict[str, StageCurves]:
    """Every metric of every stage by step, as the run's event log has them. Accuracies of the first weights stand under `base`."""
    stages: dict[str, StageCurves] = {}
    for event in events:
        match event:
            case StageStarted(stage=stage, steps=steps):
                stages[stage] = StageCurves(steps)
            case StepFinished(stage=stage, step=step, metrics=metrics):
                found = stages[stage]
                found.done = step
                for name, value in metrics.items():
                    if step <= found.steps:
                        found.metrics.setdefault(name, np.full(found.steps, math.nan))[step - 1] = value if math.isfinite(value) else math.inf
            case EvaluationFinished(stage=stage, accuracy=accuracy):
                found = stages.setdefault(stage or BASE, StageCurves(0))
                values = (accuracy.average.mean, accuracy.greedy.mean)
                found.metrics |= {name: np.asarray([value]) for name, value in zip(ACCURACY, values, strict=True)}
    return stages


def summary(stages: Mapping[str, StageCurves]) -> Summary:
    """The windows and the noise of all curves but those of the machine."""
    return {
        name: {
            metric: series(values, done=1 if metric in ACCURACY else stage.done)
            for metric, values in stage.metrics.items()
            if not metric.startswith(OF_THE_MACHINE)
        }
        for name, stage in stages.items()
    }


def series(values: NDArray[np.float64], done: int) -> Series:
    """A curve [steps], of which the first `done` steps were done, in a few numbers."""
    parts = np.array_split(np.arange(len(values)), min(WINDOWS, len(values)))
    return Series(windows=[_mean(values[part]) if part[-1] < done else math.nan for part in parts], noise=_noise(values))


def _mean(values: NDArray[np.float64]) -> float:
    """Of the values that there are; NaN without any."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else math.nan


def _noise(values: NDArray[np.float64]) -> float:
    differences = np.diff(values[np.isfinite(values)])
    spread = differences.std() if len(differences) >= NOISE_STEPS else 0.0
    return math.log(spread) if spread > 0 else math.nan

"""Is tonight's run like those of the reference? A verdict for each metric, with at most one false alarm in a hundred nights of a recipe.

Every curve is reduced to a few statistics (`SHARES`). Each is tested by a t-test that assumes that runs of other seeds are independent draws of one
normal distribution: tonight's value, and the mean of the newest nights, against the mean of the reference's runs. The standard deviation is pooled
over the reference's runs and the nights before, each around their own mean, so the test sharpens with every night. All tests of a night are
one family: Holm's procedure with weights keeps the probability that any of them is a false alarm below `ALPHA`, whatever their correlation.

The test, its assumptions, and what simulation says of both error rates: docs/nightly.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from scipy.special import stdtr, stdtrit

from tasks.curves import Series, Summary

ALPHA = 0.01
"""Largest probability that a night of a recipe in which nothing changed has a metric that is `worse`."""
LEAST_SEEDS = 5
NEWEST_NIGHTS = 7
"""Their mean is tested beside tonight's value."""
OLDER_NIGHTS = 30
"""Nights before whose spread is pooled with the reference's, at most."""
PEAK_PARTS = 8
"""Parts of a curve, the largest of whose deviations is tested."""

Words = Literal["within", "better", "worse", "insufficient"]
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Judged:
    """How a metric is judged."""

    good: Literal["higher", "lower", "same"]
    """`same`: a deviation to either side is `worse`."""
    resolution: float
    """A spread that is assumed at least, beside a thousandth of the mean: a smaller change is of no interest, also where all seeds agree."""
    weight: float = 1.0
    """Of its share of the probability of a false alarm."""


JUDGED = {
    "accuracy/average": Judged("higher", 0.002, 3.0),
    "reward/mean": Judged("higher", 0.002, 3.0),
    "sft/loss": Judged("lower", 0.001),
    "sft/validation_loss": Judged("lower", 0.001),
    "policy/entropy": Judged("same", 0.001),
    "policy/gradient_norm": Judged("same", 0.0),
    "policy/clip_fraction_low": Judged("same", 1e-4),
    "policy/clip_fraction_high": Judged("same", 1e-4),
    "policy/kl_reference": Judged("same", 1e-4),
    "policy/mean_log_prob_difference": Judged("lower", 1e-6),
    "response/tokens_mean": Judged("same", 0.05),
    "response/truncated_fraction": Judged("lower", 0.002),
    "data/zero_signal_groups": Judged("same", 0.1),
}
"""The metrics that get a verdict; the others are shown only."""

SHARES = {"value": 1.0, "mean": 0.35, "end": 0.35, "peak": 0.2, "noise": 0.1}
"""Of a metric's weight, by statistic. `value` is that of a curve of one value."""
NIGHTLY = ("value", "mean", "end", "noise")
"""Statistics whose mean over the newest nights is tested too."""


class Verdict(BaseModel):
    """What is said of one metric. Deviations are in standard deviations between runs; positive is larger than the reference."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    stage: str
    metric: str
    verdict: Words
    value: float
    """Mean of the curve's covered windows. NaN: none is covered."""
    reference: float
    """The mean of the same over the reference's runs."""
    limits: tuple[float, float]
    """Tonight's `value` outside of them would have been an alarm by itself; infinite where that side is no alarm."""
    deviation: float
    """Of `value`."""
    statistic: str
    """The one that speaks loudest: value, mean, end (last quarter), peak (largest of the parts), noise (spread from step to step)."""
    statistic_deviation: float
    """Of that one."""
    nights: int
    """1: tonight's run speaks; more: the mean of so many nights."""
    p: float
    """Adjusted for all tests of the night; at most `ALPHA` where the verdict is `worse`. NaN: nothing could be tested."""
    covered: float
    """Share of the curve that tonight's run and the reference have."""
    seeds: int
    """Runs of the reference that have it."""


@dataclass(frozen=True, slots=True)
class Night:
    """A night before, of the same reference."""

    summary: Summary
    within: frozenset[tuple[str, str]]
    """(stage, metric) of those that were within the band: what their spread is learnt from."""


def compare(reference: Mapping[str, Mapping[str, Sequence[Series]]], tonight: Summary, past: Sequence[Night] = ()) -> list[Verdict]:
    """A verdict for each metric of the reference that is judged, in the reference's order.

    Args:
        reference: by stage and metric, a series for each run.
        tonight: what there is of tonight's run.
        past: nights before of the same reference, oldest first.
    """
    curves = [
        _Curve(stage, metric, runs, tonight, past) for stage, metrics in reference.items() for metric, runs in metrics.items() if metric in JUDGED
    ]
    tests, verdicts, first = _Tests(curves, len(past)), [], 0
    for curve in curves:
        verdicts.append(curve.verdict(tests, range(first, first + len(curve.names))))
        first += len(curve.names)
    return verdicts


class _Curve:
    """The statistics of one metric: `names` [statistics]; of the reference's runs [runs, statistics], of tonight [1, statistics], of the nights
    before [nights, statistics]. NaN where a run lacks some of the windows that are compared."""

    def __init__(self, stage: str, metric: str, runs: Sequence[Series], tonight: Summary, past: Sequence[Night]) -> None:
        self.stage, self.metric, self.judged, self.runs = stage, metric, JUDGED[metric], runs
        now, count = tonight.get(stage, {}).get(metric), len(runs[0].windows)
        there = (~np.isnan(_windows(runs, count))).sum(axis=0) >= LEAST_SEEDS
        self.covered: NDArray[np.bool_] = there & ~np.isnan(_windows([now], count)[0])
        self.finite = now is None or not np.isinf(now.windows).any()
        matrix, names = _reduction(tuple(self.covered.tolist()))
        nights = [night.summary.get(stage, {}).get(metric) for night in past]
        found = [self._statistics(series, matrix) for series in (runs, [now], nights)]
        testable = ~np.isnan(found[1][0]) & ((~np.isnan(found[0])).sum(axis=0) >= LEAST_SEEDS)
        self.names = [name for name, kept in zip(names, testable, strict=True) if kept]
        self.reference, self.tonight, self.past = (values[:, testable] for values in found)
        self.known = np.asarray([(stage, metric) in night.within for night in past], dtype=bool)

    def _statistics(self, runs: Sequence[Series | None], matrix: Array) -> Array:
        windows = _windows(runs, len(self.covered))
        windows[np.isinf(windows)] = math.nan
        noise = [math.nan if run is None or not self.covered.all() else run.noise for run in runs]
        # The empty sum is no mean.
        means = windows[:, self.covered] @ matrix[self.covered] + (0.0 if self.covered.any() else math.nan)
        return np.column_stack([means, np.asarray(noise, dtype=np.float64)])

    def weights(self) -> Array:
        """Of each statistic [statistics]; the parts of the peak share theirs."""
        return np.asarray([self.judged.weight * SHARES[name] / self.names.count(name) for name in self.names])

    def verdict(self, tests: "_Tests", mine: range) -> Verdict:
        """What the tests with the numbers `mine` say."""
        word: Words = "within" if self.covered.all() and mine else "insufficient"
        if mine:
            nights, test = min(((row, number) for row in (0, 1) for number in mine), key=lambda at: (tests.worse[at], -abs(tests.deviation[at])))
            p = tests.worse[nights, test]
            if p <= ALPHA:
                word = "worse"
            elif word == "within" and tests.better[:, mine].min() <= ALPHA:
                word = "better"
                nights, test = min(((row, number) for row in (0, 1) for number in mine), key=lambda at: tests.better[at])
                p = tests.better[nights, test]
        if not self.finite:
            word = "worse"
        first = mine[0] if mine else None
        value, mean, deviation, critical = (math.nan,) * 4 if first is None else tests.tonight(first)
        return Verdict(
            stage=self.stage,
            metric=self.metric,
            verdict=word,
            value=value if self.finite else math.inf,
            reference=mean,
            limits=(
                -math.inf if first is None or self.judged.good == "lower" else mean - critical,
                math.inf if first is None or self.judged.good == "higher" else mean + critical,
            ),
            deviation=deviation,
            statistic=tests.names[test] if mine else "",
            statistic_deviation=float(tests.deviation[nights, test]) if mine else math.nan,
            nights=int(tests.count[nights, test]) if mine else 0,
            p=float(p) if mine else math.nan,
            covered=float(self.covered.mean()),
            seeds=len(self.runs),
        )


def _windows(runs: Sequence[Series | None], count: int) -> Array:
    """[runs, windows]; NaN where there is no run, or one with other windows."""
    nothing = [math.nan] * count
    rows = [nothing if run is None or len(run.windows) != count else run.windows for run in runs]
    return np.asarray(rows, dtype=np.float64).reshape(len(rows), count)


@lru_cache
def _reduction(windows: tuple[bool, ...]) -> tuple[Array, list[str]]:
    """Which mean of the covered windows each statistic is, [windows, statistics without noise], and the names of all, noise at the end."""
    covered, count = np.asarray(windows), len(windows)
    if count == 1:
        return np.ones((1, 1)), ["value", "noise"]
    number = np.arange(count)
    parts = [np.isin(number, part) for part in np.array_split(number, min(PEAK_PARTS, count)) if covered[part].all()]
    end = [number >= count - math.ceil(count / 4)] if covered.all() else []
    masks = np.asarray([covered, *parts, *end], dtype=np.float64)
    return (masks / np.maximum(masks.sum(axis=1, keepdims=True), 1)).T, ["mean", *["peak"] * len(parts), *["end"] * len(end), "noise"]


class _Tests:
    """All tests of a night, side by side: [2, statistics], tonight's value in the first row, the mean of the newest nights in the second."""

    def __init__(self, curves: Sequence[_Curve], nights: int) -> None:
        self.names = [name for curve in curves for name in curve.names]
        of_noise = np.asarray([name == "noise" for name in self.names], dtype=bool)
        judged = [curve.judged for curve in curves for _ in curve.names]
        reference = _beside([curve.reference for curve in curves])
        tonight, past = _beside([curve.tonight for curve in curves], 1), _beside([curve.past for curve in curves], nights)
        known = np.where(_beside([np.repeat(curve.known[:, None], len(curve.names), axis=1) for curve in curves], nights) == 1, past, math.nan)
        newest = past[-NEWEST_NIGHTS + 1 :]
        groups = [
            (_moments(reference), _moments(tonight), _moments(known[-OLDER_NIGHTS:])),
            (_moments(reference), _moments(np.concatenate([tonight, newest])), _moments(known[: -NEWEST_NIGHTS + 1][-OLDER_NIGHTS:])),
        ]
        n, self.count, _ = (np.stack([row[which][0] for row in groups]) for which in range(3))
        self.mean, now, _ = (np.stack([row[which][1] for row in groups]) for which in range(3))
        freedom = np.stack([sum(np.maximum(count - 1, 0) for count, _, _ in row) for row in groups])
        squares = np.stack([sum(squares for _, _, squares in row) for row in groups])
        # A change of 2 % of the noise, whose logarithm is compared, or of a thousandth of a mean, is of no interest.
        least = np.where(of_noise, 0.02, np.hypot([one.resolution for one in judged], 1e-3 * np.abs(self.mean)))
        spread = np.maximum(np.hypot(np.sqrt(squares / np.maximum(freedom, 1)), least), 1e-300)
        scale = spread * np.sqrt(1 / np.maximum(n, 1) + 1 / np.maximum(self.count, 1))
        self.deviation, t = (now - self.mean) / spread, (now - self.mean) / scale
        weights = np.concatenate([curve.weights() for curve in curves] or [np.zeros(0)])
        # Where several nights can be tested too, both tests share the weight. A test of weight 0 is none.
        both = np.isin(self.names, NIGHTLY) & (self.count[1] > 1)
        share = np.stack([np.where(both, 0.5, 1.0), np.where(both, 0.5, 0.0)]) * weights
        # A change of the noise is a change, whatever the metric's good side is.
        same = np.broadcast_to(of_noise | np.asarray([one.good == "same" for one in judged], dtype=bool), t.shape)
        towards_bad = t * np.asarray([-1.0 if one.good == "higher" else 1.0 for one in judged])
        self.worse = adjusted(np.where(same, 2 * stdtr(freedom, -np.abs(t)), stdtr(freedom, -towards_bad)), share)
        self.better = adjusted(np.where(same, 1.0, stdtr(freedom, towards_bad)), share)
        alone = ALPHA * share[0] / max(share.sum(), 1e-300)
        self.critical = -scale[0] * stdtrit(freedom[0], np.where(same[0], alone / 2, alone))
        self.value = tonight[0]

    def tonight(self, number: int) -> tuple[float, float, float, float]:
        """Of a statistic: tonight's value, the reference's mean, how many standard deviations lie between them, and how far would be an alarm."""
        return float(self.value[number]), float(self.mean[0, number]), float(self.deviation[0, number]), float(self.critical[number])


def _beside(parts: Sequence[NDArray[Any]], rows: int = 0) -> Array:
    """Columns of all parts beside each other; NaN below those that have fewer rows."""
    result = np.full((max((len(part) for part in parts), default=rows), sum(part.shape[1] for part in parts)), math.nan)
    first = 0
    for part in parts:
        result[: len(part), first : first + part.shape[1]] = part
        first += part.shape[1]
    return result


def _moments(values: Array) -> tuple[Array, Array, Array]:
    """Number, mean, and sum of squares around the mean, of what is not NaN in each column of [rows, columns]; 0 of an empty one."""
    there = ~np.isnan(values)
    count = there.sum(axis=0)
    mean = np.where(there, values, 0.0).sum(axis=0) / np.maximum(count, 1)
    return count, mean, (np.where(there, values - mean, 0.0) ** 2).sum(axis=0)


def adjusted(p: Array, weights: Array) -> Array:
    """p-values as they are after all tests were looked at: where those up to alpha are rejected, the probability of any false rejection is at most
    alpha, whatever the correlation. Holm's procedure with weights (Holm 1979, Scandinavian Journal of Statistics 6, section 4).

    Args:
        p: of any shape.
        weights: of the same shape, not below 0. A test of weight 0 is not looked at: 1.
    """
    result = np.ones_like(p)
    looked_at = weights > 0
    values, shares = p[looked_at], weights[looked_at]
    order = np.argsort(values / shares, kind="stable")
    left = np.cumsum(shares[order][::-1])[::-1]
    steps = np.empty_like(values)
    steps[order] = np.minimum(np.maximum.accumulate(values[order] / shares[order] * left), 1.0)
    result[looked_at] = steps
    return result

"""Statistics merge to what all observations together give."""

import itertools
import math
import pickle
import statistics as python_statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.metrics import EffectiveFraction, ExplainedVariance, Maximum, Mean, Moments, StandardDeviation, Statistics, Sum, merge

VALUES = st.lists(st.floats(-100, 100), min_size=1, max_size=12)


def observe(values: list[float]) -> Statistics:
    statistics = Statistics()
    statistics.add("mean", Mean.of(values))
    statistics.add("sum", Sum(math.fsum(values)))
    statistics.add("std", StandardDeviation.of(values))
    for value in values:
        statistics.add("max", Maximum(value))
    return statistics


@given(values=VALUES, edges=st.lists(st.integers(0, 12), max_size=4))
def test_merging_parts_gives_the_whole(values: list[float], edges: list[int]) -> None:
    # Mutation: merge means by averaging them, or forget the count in the standard deviation.
    bounds = [0, *sorted(edges), 12]
    parts = [observe(values[start:end]) for start, end in itertools.pairwise(bounds)]
    merged = merge(parts).result()
    assert merged["mean"] == pytest.approx(python_statistics.fmean(values), abs=1e-9)
    assert merged["sum"] == pytest.approx(math.fsum(values), abs=1e-9)
    assert merged["max"] == max(values)
    spread = python_statistics.stdev(values) if len(values) > 1 else 0.0
    assert merged["std"] == pytest.approx(spread, abs=1e-5)


def test_golden_values() -> None:
    # Squares of the deviations of [1, 0, 0, 1] from 1/2: 1; over n - 1 = 3. Mutation: ddof 0 gives 0.5.
    assert StandardDeviation.of([1, 0, 0, 1]).result() == pytest.approx(math.sqrt(1 / 3))
    assert StandardDeviation.of([0.1] * 7).result() == pytest.approx(0, abs=1e-8)
    assert StandardDeviation.of([3.0]).result() == 0
    assert math.isnan(StandardDeviation.of([math.nan, 1.0]).result() or 0.0)
    assert EffectiveFraction.of([1.0, 1.0]).result() == 1
    assert EffectiveFraction.of([2.0, 0.0]).result() == 0.5


def explained(targets: list[float], predictions: list[float]) -> ExplainedVariance:
    return ExplainedVariance(Moments.of(targets), Moments.of(g - v for g, v in zip(targets, predictions, strict=True)))


def test_explained_variance_golden_values() -> None:
    # Targets 0, 1, 2: spread 2. Errors 0, 0, 1: mean 1/3, spread 1 - 3/9 = 2/3. 1 - (2/3) / 2 = 2/3.
    # Mutation: mean square of the error instead of its variance gives 1 - 1/2, and punishes a constant offset.
    assert explained([0, 1, 2], [0, 1, 1]).result() == pytest.approx(2 / 3)
    assert explained([0, 1, 2], [5, 6, 7]).result() == pytest.approx(1)
    assert explained([0, 1, 2], [7, 7, 7]).result() == pytest.approx(0)
    assert explained([0, 1, 2], [2, 1, 0]).result() == pytest.approx(-3)
    # Mutation: no tolerance; what rounding leaves of a constant is then divided by.
    assert explained([0.7] * 7, [0.3, 0.2, 0.1, 0, 0, 0, 0]).result() is None
    assert explained([], []).result() is None
    assert math.isnan(explained([math.nan, 1.0], [0.0, 0.0]).result() or 0.0)


@given(pairs=st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=2, max_size=12), cut=st.integers(0, 12))
def test_explained_variance_merges_exactly(pairs: list[tuple[float, float]], cut: int) -> None:
    # Mutation: merge the two results by their counts.
    targets, predictions = [g for g, _ in pairs], [v for _, v in pairs]
    merged = explained(targets[:cut], predictions[:cut]).merge(explained(targets[cut:], predictions[cut:])).result()
    if merged is None or python_statistics.pvariance(targets) < 1e-3:
        return
    errors = [g - v for g, v in pairs]
    assert merged == pytest.approx(1 - python_statistics.pvariance(errors) / python_statistics.pvariance(targets), rel=1e-6, abs=1e-6)


def test_nothing_observed_is_left_out() -> None:
    empty = Statistics()
    empty.add("mean", Mean(0, 0))
    empty.add("std", StandardDeviation.of([]))
    empty.add("fraction", EffectiveFraction.of([]))
    assert empty.result() == {}
    assert merge([empty, observe([2.0])]).result()["mean"] == 2
    assert merge([]).result() == {}


def test_one_name_is_one_kind() -> None:
    statistics = observe([1.0])
    with pytest.raises(ValueError, match="metric mean is a Mean and cannot take a Sum"):
        statistics.add("mean", Sum(1.0))


def test_merging_leaves_the_parts_alone() -> None:
    one, other = observe([1.0]), observe([3.0])
    merge([one, other])
    assert one.result()["mean"] == 1


def test_pickles() -> None:
    assert pickle.loads(pickle.dumps(observe([1.0, 2.0]))).result() == observe([1.0, 2.0]).result()

"""The nightly test: what it says of curves whose distribution is known."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from scipy.stats import t as student

from tasks import comparison
from tasks.comparison import ALPHA, JUDGED, Night, adjusted, compare
from tasks.curves import Series, Summary

METRICS = ["reward/mean", "policy/entropy", "policy/gradient_norm", "response/tokens_mean", "policy/clip_fraction_high", "data/zero_signal_groups"]


def run(random: np.random.Generator, shift: float = 0.0, metrics: Sequence[str] = METRICS) -> Summary:
    """Curves around 10: half of a run's variance is its seed's, the other half comes and goes along the curve. `shift` is that of the first one."""
    found = {}
    for number, metric in enumerate(metrics):
        curve = 10 + random.normal() + np.repeat(random.normal(size=12), 2) + (shift if number == 0 else 0.0)
        found[metric] = Series(windows=curve.tolist(), noise=0.1 * random.normal())
    return {"rl": found, "base": {"accuracy/average": Series(windows=[random.normal()], noise=math.nan)}}


def reference(random: np.random.Generator, seeds: int = 5) -> dict[str, dict[str, list[Series]]]:
    runs = [run(random) for _ in range(seeds)]
    return {stage: {metric: [one[stage][metric] for one in runs] for metric in metrics} for stage, metrics in runs[0].items()}


def words(verdicts: Sequence[comparison.Verdict]) -> dict[str, str]:
    return {verdict.metric: verdict.verdict for verdict in verdicts}


def alarms(nights: int, past: int) -> int:
    """Nights with an alarm, of so many in which nothing is wrong."""
    random, found = np.random.default_rng(7), 0
    for _ in range(nights):
        before = [Night(run(random), frozenset(("rl", metric) for metric in METRICS)) for _ in range(past)]
        found += "worse" in words(compare(reference(random), run(random), before)).values()
    return found


@pytest.mark.parametrize("past", [0, 8])
def test_false_alarms_are_no_more_than_promised(past: int) -> None:
    """Mutation: take p as it is in `adjusted` (no correction), or 1 instead of 1/n + 1/m in `scale` (a reference whose mean were known)."""
    nights = 400
    # Were the rate 1 %, more would be found once in ten thousand.
    assert binomtest(alarms(nights, past), nights, ALPHA, alternative="greater").pvalue > 1e-4


def test_a_p_value_is_the_prediction_intervals() -> None:
    """Reference 1..5: mean 3, spread sqrt(2.5). Tonight 20 is 17 / (sqrt(2.5) sqrt(1 + 1/5)) = 9.815 standard errors away, of a t with 4 degrees.
    A curve of one value is the only test, so nothing is adjusted. Mutation: freedom n instead of n - 1, or the side of `lower` turned round."""
    series = [Series(windows=[float(value)], noise=math.nan) for value in (1, 2, 3, 4, 5)]
    expected = student.sf(17 / math.sqrt(2.5 * 1.2), 4)
    for metric, value, word in (("sft/loss", 20.0, "worse"), ("sft/loss", -14.0, "better"), ("policy/entropy", -14.0, "worse")):
        (verdict,) = compare({"x": {metric: series}}, {"x": {metric: Series(windows=[value], noise=math.nan)}})
        assert verdict.verdict == word
        assert verdict.p == pytest.approx(expected * (2 if metric == "policy/entropy" else 1), rel=1e-4)
    assert expected < ALPHA / 2


def test_tonight_alone_is_judged_at_its_limit() -> None:
    """`limits` are where the alarm begins, beside another metric that is well. Mutations: leave the share out of `alone`; all of it for each of two
    sides."""
    series = [Series(windows=[float(value)], noise=math.nan) for value in (1, 2, 3, 4, 5)]
    stored = {"x": {"reward/mean": series, "policy/entropy": series}}

    def found(metric: str, value: float) -> comparison.Verdict:
        tonight = {name: Series(windows=[value if name == metric else 3.0], noise=math.nan) for name in stored["x"]}
        return next(verdict for verdict in compare(stored, {"x": tonight}) if verdict.metric == metric)

    assert found("reward/mean", 3.0).limits[1] == math.inf
    for metric, side in (("reward/mean", 0), ("policy/entropy", 0), ("policy/entropy", 1)):
        limit, further = found(metric, 3.0).limits[side], (-1e-6, 1e-6)[side]
        assert found(metric, limit + further).verdict == "worse"
        assert found(metric, limit - further).verdict == "within"


def test_a_large_regression_is_found_in_one_night_and_a_smaller_one_in_seven() -> None:
    """Mutation: leave the newest nights out of the second row."""
    random = np.random.default_rng(1)
    stored = reference(random, seeds=10)
    before = [Night(run(random), frozenset(("rl", metric) for metric in METRICS)) for _ in range(20)]
    assert words(compare(stored, run(random, -12.0), before))["reward/mean"] == "worse"
    small = [Night(run(random, -4.0), frozenset()) for _ in range(6)]
    found = next(verdict for verdict in compare(stored, run(random, -4.0), [*before, *small]) if verdict.metric == "reward/mean")
    assert (found.verdict, found.nights) == ("worse", 7)
    assert words(compare(stored, run(random, +12.0), before))["reward/mean"] == "better"


def test_what_the_budget_cut_off_is_insufficient_and_what_there_is_is_judged() -> None:
    """Mutation: judge a curve as a whole by what is covered (`within`), or not at all."""
    random = np.random.default_rng(2)
    stored = reference(random, seeds=10)

    def cut(shift: float) -> Summary:
        whole = run(random, shift)["rl"]
        return {"rl": {name: Series(windows=[*series.windows[:12], *[math.nan] * 12], noise=math.nan) for name, series in whole.items()}}

    short = compare(stored, cut(0.0))
    assert set(words(short).values()) == {"insufficient"}
    assert {verdict.covered for verdict in short} == {0.5, 0.0}
    assert words(compare(stored, cut(-30.0)))["reward/mean"] == "worse"
    nothing = compare(stored, {})
    assert {(verdict.verdict, verdict.statistic) for verdict in nothing} == {("insufficient", "")}
    assert all(math.isnan(verdict.value) and math.isnan(verdict.reference) for verdict in nothing)


def test_few_seeds_are_insufficient_and_values_that_are_not_finite_are_worse() -> None:
    random = np.random.default_rng(3)
    assert set(words(compare(reference(random, seeds=4), run(random))).values()) == {"insufficient"}
    broken = run(random)
    broken["rl"]["reward/mean"].windows[3] = math.inf
    assert words(compare(reference(random), broken))["reward/mean"] == "worse"


def test_seeds_that_all_agree_leave_room_for_what_is_of_no_interest() -> None:
    """Clip fractions of a recipe with one update a step are 0. Mutation: no resolution; any other number is then infinitely far away."""
    zero = [Series(windows=[0.0] * 24, noise=math.nan)] * 5
    for value, word in ((0.0, "within"), (1e-5, "within"), (0.01, "worse")):
        now = {"rl": {"policy/clip_fraction_high": Series(windows=[value] * 24, noise=math.nan)}}
        assert words(compare({"rl": {"policy/clip_fraction_high": zero}}, now)) == {"policy/clip_fraction_high": word}


@given(st.lists(st.tuples(st.floats(1e-6, 1), st.floats(0.1, 5)), min_size=1, max_size=12))
def test_holm_with_equal_weights_is_holms(pairs: list[tuple[float, float]]) -> None:
    """Holm 1979: the i-th smallest of k p-values (from 0) times k - i, and never below the one before; with weights, never below Bonferroni's
    share. Mutation: leave `maximum.accumulate` out."""
    p, weights = np.asarray([pair[0] for pair in pairs]), np.asarray([pair[1] for pair in pairs])
    expected, largest = np.empty(len(p)), 0.0
    for place, index in enumerate(np.argsort(p, kind="stable")):
        largest = max(largest, min(1.0, (len(p) - place) * p[index]))
        expected[index] = largest
    np.testing.assert_allclose(adjusted(p, np.ones(len(p))), expected)
    weighted = adjusted(p, weights)
    assert (weighted >= p - 1e-12).all()
    assert (weighted <= np.minimum(1, p * weights.sum() / weights) + 1e-12).all()


def test_every_judged_metric_is_one_that_is_recorded() -> None:
    """Mutation: misspell one; it would never be judged."""
    from pathlib import Path

    documented = (Path(__file__).parents[3] / "docs" / "tracking.md").read_text()
    assert [metric for metric in JUDGED if metric != "accuracy/average" and f"`{metric}`" not in documented] == []

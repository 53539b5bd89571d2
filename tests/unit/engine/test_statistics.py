"""Accuracy and its intervals: golden values, coverage by simulation, and a global random state left alone."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.statistics import Interval, accuracy_interval, avg_at_n, paired_gain_interval, pass_at_k


@pytest.mark.parametrize(("n", "c", "k", "value"), [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 1, 4, 1.0), (4, 0, 4, 0.0), (4, 4, 1, 1.0), (5, 2, 4, 1.0)])
def test_pass_at_k_golden_values(n: int, c: int, k: int, value: float) -> None:
    # Mutation: 1 - (1 - c / n) ** k gives 0.4375 at n 4, c 1, k 2.
    assert pass_at_k(n, c, k) == pytest.approx(value)


@given(n=st.integers(1, 40), data=st.data())
def test_pass_at_k_is_the_formula(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert float(pass_at_k(n, c, k)) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    # Mean over every subset of k of the samples whether it holds a right one.
    samples = [True, False, False, True, False, False]
    for k in range(1, 7):
        hits = [any(subset) for subset in itertools.combinations(samples, k)]
        assert float(pass_at_k(6, 2, k)) == pytest.approx(np.mean(hits))


def test_pass_at_k_over_prompts_and_large_n() -> None:
    assert pass_at_k(4, [0, 1, 4], 2).tolist() == pytest.approx([0, 0.5, 1])
    # C(10000, 5000) is beyond a float. Mutation: compute the binomials in float64.
    assert 0.99 < float(pass_at_k(10_000, 10, 5_000)) < 1


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5), ([4, 2], [1, 1], 3)])
def test_pass_at_k_refuses_impossible_counts(n: object, c: object, k: int) -> None:
    with pytest.raises(ValueError, match="0 <= c <= n and 1 <= k <= n"):
        pass_at_k(n, c, k)  # type: ignore[arg-type]


def test_avg_at_n() -> None:
    assert avg_at_n([[1, 0, 0, 0], [1, 1, 0, 0]]) == 0.375


def test_interval_of_two_prompts_by_hand() -> None:
    # Two prompts that score 0 and 1: resampled means are 0, 1/2, 1 with chances 1/4, 1/2, 1/4. The 40 % interval lies within the middle.
    assert accuracy_interval([0.0, 1.0], resamples=4000, confidence=0.4, seed=0) == Interval(mean=0.5, low=0.5, high=0.5)
    assert accuracy_interval([0.0, 1.0], resamples=4000, confidence=0.6, seed=0) == Interval(mean=0.5, low=0.0, high=1.0)


def test_samples_of_a_prompt_are_not_independent() -> None:
    # Prompts that are right always or never: 8 samples each tell no more than one. Mutation: resample all samples; 2.8 times too narrow.
    per_prompt = np.arange(40) % 2
    one = accuracy_interval(per_prompt, 1000, 0.95, 3)
    eight = accuracy_interval(np.repeat(per_prompt[:, None], 8, axis=1), 1000, 0.95, 3)
    assert one == eight
    # 1.96 x sqrt(0.25 / 40) = 0.155 on each side
    assert one.high - one.low == pytest.approx(0.31, abs=0.05)


def test_pairing_removes_what_prompts_have_in_common() -> None:
    # Every prompt gains 1/8, however hard it is. Mutation: resample before and after separately: a wide interval.
    before = np.random.default_rng(0).integers(0, 8, size=50) / 8
    gain = paired_gain_interval(before, before + 0.125, 500, 0.95, 0)
    assert gain.low == gain.high == gain.mean == 0.125
    assert paired_gain_interval([[0, 0], [1, 1]], [1.0, 1.0], 500, 0.95, 0).mean == 0.5


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    # 400 evaluations of 100 prompts, whose chances are beta(2, 2), so 1/2 in the mean, with 8 samples each; a gain of 0 between two of them.
    # Mutation: alpha instead of alpha / 2 on each side: 90 % nominal, the count falls below.
    generator = np.random.default_rng(11)
    covered = paired = 0
    for trial in range(400):
        chances = generator.beta(2, 2, size=(100, 1))
        before, after = (generator.random((100, 8)) < chances for _ in range(2))
        interval = accuracy_interval(before, 300, 0.95, trial)
        gain = paired_gain_interval(before, after, 300, 0.95, trial)
        covered += interval.low <= 0.5 <= interval.high
        paired += gain.low <= 0 <= gain.high
    assert 0.92 <= covered / 400 <= 0.98
    assert 0.92 <= paired / 400 <= 0.98


def test_a_generator_of_its_own() -> None:
    # Mutation: np.random.seed(seed), or np.random.randint.
    scores = np.arange(30) % 3 / 2
    np.random.seed(5)
    before = np.random.get_state()[1].tolist(), np.random.get_state()[2]
    first = accuracy_interval(scores, 200, 0.95, 1)
    paired_gain_interval(scores, scores[::-1], 200, 0.95, 1)
    assert (np.random.get_state()[1].tolist(), np.random.get_state()[2]) == before
    assert first == accuracy_interval(scores, 200, 0.95, 1)
    assert first != accuracy_interval(scores, 200, 0.95, 2)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([], "at least one of each"),
        ([[]], "at least one of each"),
        (1.0, "at least one of each"),
        ([0.0, math.nan], "prompt 1 "),
        ([[0, 1], [1]], "scores: every prompt needs the same number of samples"),
    ],
)
def test_bad_scores(scores: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accuracy_interval(scores, 10, 0.95, 0)  # type: ignore[arg-type]


def test_pairs_need_the_same_prompts() -> None:
    with pytest.raises(ValueError, match="before has 2, after has 1"):
        paired_gain_interval([0.0, 1.0], [1.0], 10, 0.95, 0)

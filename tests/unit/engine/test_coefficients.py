"""Controllers of the KL penalty and of the entropy bonus."""

import math

import pytest

from engine.algorithms.coefficients import Coefficients, Observed, adapted_entropy, adapted_kl
from engine.config import AdaptiveEntropyConfig, AdaptiveKLConfig, AlgorithmConfig, EntropyConfig, KLConfig

KL = AdaptiveKLConfig(target=0.1, horizon=1000)
ENTROPY = AdaptiveEntropyConfig(target=0.5, step=0.02, maximum=0.05)
FIXED = AlgorithmConfig(kl=KLConfig(coefficient=0.1), entropy=EntropyConfig(coefficient=0.02))
ADAPTIVE = AlgorithmConfig(kl=KLConfig(coefficient=0.1, adaptive=KL), entropy=EntropyConfig(coefficient=0.02, adaptive=ENTROPY))


@pytest.mark.parametrize(
    ("distance", "samples", "coefficient"),
    [
        (0.1, 500, 2.0),  # on target
        (0.11, 500, 2.1),  # 2 (1 + 0.1 x 500 / 1000). Mutation: distance - target for distance / target - 1 gives 2.01.
        (0.09, 500, 1.9),
        (5.0, 500, 2.2),  # clipped to + 0.2. Mutation: without the clip 2 (1 + 49 / 2) = 51.
        (-5.0, 500, 1.8),  # k1 can be negative
        (math.inf, 500, 2.2),
        (0.0, 8000, 0.0),  # Mutation: without the bound 2 (1 - 1.6) = -1.2, a reward for the distance.
        (math.nan, 500, 2.0),  # Mutation: NaN for ever.
    ],
)
def test_adapted_kl(distance: float, samples: int, coefficient: float) -> None:
    assert adapted_kl(2.0, distance, samples, KL) == pytest.approx(coefficient)


@pytest.mark.parametrize(
    ("before", "entropy", "after"),
    [
        (0.02, 0.4, 0.04),  # Mutation: the sign; proportional to the difference.
        (0.02, 0.6, 0.0),
        (0.02, 0.5, 0.02),
        (0.01, 9.0, 0.0),  # never negative
        (0.04, 0.0, 0.05),  # never above the maximum
        (0.02, math.nan, 0.02),
    ],
)
def test_adapted_entropy(before: float, entropy: float, after: float) -> None:
    assert adapted_entropy(before, entropy, ENTROPY) == pytest.approx(after)


def test_a_stage_begins_with_what_is_configured() -> None:
    assert Coefficients.first(FIXED) == Coefficients(kl=0.1, entropy=0.02)
    assert Coefficients.first(AlgorithmConfig()) == Coefficients(kl=0.0, entropy=0.0)


def test_fixed_coefficients_stay() -> None:
    # Mutation: let the controller of one term move the other's coefficient.
    start, far = Coefficients.first(FIXED), Observed(kl=9.0, entropy=9.0, samples=500)
    assert start.after(FIXED, far) == start.in_force(FIXED, far) == start
    only_kl = FIXED.model_copy(update={"kl": ADAPTIVE.kl})
    assert start.after(only_kl, far) == Coefficients(kl=pytest.approx(0.11), entropy=0.02)


def test_an_adaptive_bonus_rests_above_its_target() -> None:
    # Mutation: give it at any entropy: it would push away from the target.
    start = Coefficients.first(ADAPTIVE)
    assert start.in_force(ADAPTIVE, Observed(kl=0.0, entropy=0.51, samples=1)) == Coefficients(kl=0.1, entropy=0.0)
    assert start.in_force(ADAPTIVE, Observed(kl=0.0, entropy=0.5, samples=1)) == start
    assert start.in_force(ADAPTIVE, Observed(kl=0.0, entropy=math.nan, samples=1)).entropy == 0.0


def test_both_over_three_steps() -> None:
    coefficients, seen = Coefficients.first(ADAPTIVE), []
    for observed in (Observed(0.2, 0.4, 500), Observed(0.2, 0.4, 500), Observed(0.0, 0.6, 500)):
        coefficients = coefficients.after(ADAPTIVE, observed)
        seen.append((coefficients.kl, coefficients.entropy))
    # 0.1 x 1.1 x 1.1 x 0.9; 0.02 + 0.02, capped at 0.05, - 0.02.
    assert seen == [(pytest.approx(0.11), pytest.approx(0.04)), (pytest.approx(0.121), 0.05), (pytest.approx(0.1089), pytest.approx(0.03))]

"""Generalised advantage estimation: golden values, its two limits, and what may not change it (observation tokens, empty rows)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.algorithms.gae import gae
from engine.algorithms.registry import ADVANTAGES
from engine.algorithms.returns import whiten
from engine.algorithms.types import AdvantageInputs, Advantages
from engine.config import GAEAdvantageConfig

FRACTION = st.floats(0.05, 1)


def estimate(
    rewards: Tensor, values: Tensor | None, mask: Tensor, token_rewards: Tensor | None = None, *, gamma: float, lam: float, whiten: bool = False
) -> Advantages:
    inputs = AdvantageInputs(rewards=rewards, group=torch.arange(len(mask)), mask=mask, token_rewards=token_rewards, values=values)
    return ADVANTAGES.get("gae")(inputs, GAEAdvantageConfig(estimator="gae", gamma=gamma, lam=lam, whiten=whiten))


def samples(seed: int, rows: int = 4, length: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(rows, length, generator=generator) < 0.7
    return {"rewards": normal(rows), "values": normal(rows, length), "mask": mask, "token_rewards": normal(rows, length)}


def test_golden_values() -> None:
    # gamma 0.9, lam 0.5, V = .5 .4 .8, the outcome 1 on the last token.
    # delta = .9 x .4 - .5 = -.14;  .9 x .8 - .4 = .32;  1 - .8 = .2. Backwards with .45: .2;  .32 + .45 x .2 = .41;  -.14 + .45 x .41 = .0445.
    # Mutation: the outcome on every token gives .2 at the end and more before; lam alone (without gamma) .42 in the middle.
    values, mask = torch.tensor([[0.5, 0.4, 0.8]]), torch.ones(1, 3, dtype=torch.bool)
    result = estimate(torch.tensor([1.0]), values, mask, gamma=0.9, lam=0.5)
    torch.testing.assert_close(result.advantages, torch.tensor([[0.0445, 0.41, 0.2]]))
    torch.testing.assert_close(result.returns, torch.tensor([[0.5445, 0.81, 1.0]]))
    # -.1 on the middle token beside it: .41 - .1 = .31; -.14 + .45 x .31 = -.0005.
    result = estimate(torch.tensor([1.0]), values, mask, torch.tensor([[0.0, -0.1, 0.0]]), gamma=0.9, lam=0.5)
    torch.testing.assert_close(result.advantages, torch.tensor([[-0.0005, 0.31, 0.2]]))


def test_the_outcome_stands_on_the_last_response_token_whatever_follows() -> None:
    # Mutation: on the last column; it is then outside the mask and lost.
    mask = torch.tensor([[False, True, False, True, False, False]])
    result = estimate(torch.tensor([1.0]), torch.zeros(1, 6), mask, gamma=0.5, lam=0.0)
    assert result.advantages.tolist() == [[0, 0, 0, 1, 0, 0]]


@given(seed=st.integers(0, 999), gamma=FRACTION, lam=st.floats(0, 1))
def test_equals_the_definition_written_out(seed: int, gamma: float, lam: float) -> None:
    # A_t = sum over l of (gamma lam)^l delta_(t+l), over the row's response tokens in order (equation 16).
    case = samples(seed)
    result = estimate(**case, gamma=gamma, lam=lam)
    for row in range(4):
        kept = case["mask"][row].nonzero().flatten().tolist()
        rewards = [case["token_rewards"][row, t].item() + (case["rewards"][row].item() if t == kept[-1] else 0) for t in kept]
        values = [*(case["values"][row, t].item() for t in kept), 0.0]
        deltas = [reward + gamma * after - before for reward, before, after in zip(rewards, values, values[1:], strict=False)]
        expected = [math.fsum((gamma * lam) ** later * delta for later, delta in enumerate(deltas[start:])) for start in range(len(kept))]
        assert result.advantages[row, kept].tolist() == pytest.approx(expected, abs=1e-12)
        assert result.returns is not None
        assert result.returns[row, kept].tolist() == pytest.approx([a + v for a, v in zip(expected, values, strict=False)], abs=1e-12)


@given(seed=st.integers(0, 999))
def test_lam_and_gamma_of_one_give_the_reward_to_go_minus_the_value(seed: int) -> None:
    case = samples(seed)
    result = estimate(**case, gamma=1, lam=1)
    earned = torch.where(case["mask"], case["token_rewards"], 0)
    to_go = earned.flip(1).cumsum(1).flip(1) + case["rewards"][:, None]
    torch.testing.assert_close(result.advantages, torch.where(case["mask"], to_go - case["values"], 0))
    torch.testing.assert_close(result.returns, torch.where(case["mask"], to_go, 0))


@given(seed=st.integers(0, 999), gamma=FRACTION)
def test_lam_of_zero_gives_the_one_step_error(seed: int, gamma: float) -> None:
    case = samples(seed) | {"mask": torch.ones(4, 6, dtype=torch.bool)}
    result = estimate(**case, gamma=gamma, lam=0)
    earned = case["token_rewards"].clone()
    earned[:, -1] += case["rewards"]
    after = torch.cat([case["values"][:, 1:], torch.zeros(4, 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(result.advantages, earned + gamma * after - case["values"])


@given(seed=st.integers(0, 999), gaps=st.lists(st.integers(0, 3), min_size=7, max_size=7), gamma=FRACTION, lam=st.floats(0, 1), whiten=st.booleans())
def test_observation_tokens_are_transparent(seed: int, gaps: list[int], gamma: float, lam: float, whiten: bool) -> None:
    # Rule 5: before, between and after response tokens. What stands there may be anything.
    # Mutation: discount once more for every masked token, or let its value count as the next one.
    case = samples(seed)
    places = [t + sum(gaps[: t + 1]) for t in range(6)]
    wide = {"rewards": case["rewards"]}
    for name, filler in (("values", math.nan), ("mask", False), ("token_rewards", math.inf)):
        wide[name] = torch.full((4, 6 + sum(gaps)), filler, dtype=case[name].dtype)
        wide[name][:, places] = case[name]
    plain, spread = (estimate(**inputs, gamma=gamma, lam=lam, whiten=whiten) for inputs in (case, wide))
    for before, after in ((plain.advantages, spread.advantages), (plain.returns, spread.returns)):
        assert before is not None
        assert after is not None
        torch.testing.assert_close(after[:, places], before, rtol=1e-12, atol=1e-12)
        assert after[~wide["mask"]].eq(0).all()


@given(seed=st.integers(0, 999), at=st.integers(0, 4), whiten=st.booleans())
@pytest.mark.parametrize("poison", [1e9, math.nan, math.inf])
def test_a_row_without_response_tokens_earns_nothing_and_disturbs_no_one(poison: float, seed: int, at: int, whiten: bool) -> None:
    # Mutation: whiten over all positions, or over all rows.
    case = samples(seed)
    beside = {}
    for name, tensor in case.items():
        row = torch.full_like(tensor[:1], False if name == "mask" else poison)
        beside[name] = torch.cat([tensor[:at], row, tensor[at:]])
    plain, more = (estimate(**inputs, gamma=0.9, lam=0.8, whiten=whiten) for inputs in (case, beside))
    others = [row for row in range(5) if row != at]
    torch.testing.assert_close(more.advantages[others], plain.advantages, rtol=1e-12, atol=1e-12)
    assert more.advantages[at].eq(0).all()
    assert more.returns is not None
    assert more.returns[at].eq(0).all()


def test_whitening_golden_values() -> None:
    # 1, 2, 3: mean 2, squares 2, over n - 1 = 2: variance 1. Mutation: n gives +-1.2247; no epsilon differs in the ninth digit only, so
    # a second set: 0 and 2e-4, variance 2e-8, +-1e-4 / sqrt(3e-8) = +-0.5773503. Mutation: 1e-8 added to the deviation gives +-0.70706.
    mask = torch.tensor([[True, False, True], [False, False, True]])
    values = torch.tensor([[1.0, math.nan, 2.0], [50.0, math.inf, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(whiten(values, mask), torch.tensor([[-1.0, 0, 0], [0, 0, 1]], dtype=torch.float64), rtol=1e-7, atol=1e-12)
    pair = whiten(torch.tensor([[0, 2e-4]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(pair, torch.tensor([[-0.5773503, 0.5773503]], dtype=torch.float64), rtol=0, atol=1e-7)


@pytest.mark.parametrize("tokens", [0, 1])
def test_whitening_of_one_token_or_none_gives_zero(tokens: int) -> None:
    assert whiten(torch.full((1, 2), 3.0), torch.tensor([[tokens == 1, False]])).tolist() == [[0, 0]]


def test_returns_are_of_the_advantages_before_whitening() -> None:
    # Mutation: whiten first; the critic would then chase its own mean.
    case = samples(3)
    plain, whitened = (estimate(**case, gamma=0.9, lam=0.8, whiten=whiten) for whiten in (False, True))
    torch.testing.assert_close(whitened.returns, plain.returns)
    assert whitened.advantages[case["mask"]].std().item() == pytest.approx(1, abs=1e-6)
    assert not torch.allclose(whitened.advantages, plain.advantages)


def test_float32_in_gives_float32_out_and_float64_inside() -> None:
    # 4096 tokens of -1e-4 each beside an outcome of 1: float32's running sum is off by 1e-5 by then. Mutation: leave both `.double()` out.
    mask, small = torch.ones(1, 4096, dtype=torch.bool), torch.full((1, 4096), -1e-4)
    result = estimate(torch.tensor([1.0]), torch.zeros(1, 4096), mask, small, gamma=1, lam=1)
    assert result.advantages.dtype == torch.float32
    assert result.advantages[0, 0].item() == pytest.approx(1 - 4096 * small[0, 0].abs().item(), abs=1e-7)


def test_nothing_to_estimate() -> None:
    assert gae(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), 1, 1).shape == (2, 0)
    assert estimate(torch.zeros(0), torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool), gamma=1, lam=1, whiten=True).advantages.shape == (0, 3)


def test_values_are_needed() -> None:
    with pytest.raises(ValueError, match=r"set algorithm\.critic\.optimizer\.learning_rate"):
        estimate(torch.zeros(1), None, torch.ones(1, 2, dtype=torch.bool), gamma=1, lam=1)

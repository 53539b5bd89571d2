"""PPO's loss: golden values, which bound cuts off which gradient, and that masked positions cannot be felt."""

import math

import pytest
import torch

from engine.algorithms.ppo import loss
from engine.algorithms.registry import LOSSES
from engine.algorithms.types import LossInputs
from engine.config import PPOLossConfig


def inputs_of(ratio: list[float], advantage: list[float], mask: list[bool] | None = None) -> LossInputs:
    old = torch.full((1, len(ratio)), -1.0, dtype=torch.float64)
    return LossInputs(
        log_probs=(old + torch.tensor([ratio], dtype=torch.float64).log()).requires_grad_(),
        old_log_probs=old,
        rollout_log_probs=old,
        advantages=torch.tensor([advantage], dtype=torch.float64),
        mask=torch.tensor([[True] * len(ratio) if mask is None else mask]),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "term", "gradient"),
    [
        # max(-1.5, -1.28): the upper bound, and no gradient. Mutation: swap clip_low and clip_high (-1.2).
        (1.5, 1.0, 3.0, -1.28, 0.0),
        # max(4, 1.28) = 4, then min(4, 3). Mutation: leave the dual clip out (4).
        (4.0, -1.0, 3.0, 3.0, 0.0),
        (4.0, -1.0, None, 4.0, 4.0),
        # Below the lower bound with A < 0: max(0.5, 0.8). Mutation: minimum for maximum (0.5).
        (0.5, -1.0, 3.0, 0.8, 0.0),
        # Below it with A > 0 the ratio may grow again: max(-0.5, -0.8).
        (0.5, 1.0, 3.0, -0.5, -0.5),
        # d term / d log_prob = -A rho.
        (1.1, 2.0, 3.0, -2.2, -2.2),
        (1.1, -2.0, 3.0, 2.2, 2.2),
        # At rho = 1 both arguments of the maximum are equal, and their halved gradients add up to the whole.
        (1.0, 2.0, 3.0, -2.0, -2.0),
        # The dual clip is for A < 0 alone.
        (1.0, 0.0, 3.0, 0.0, 0.0),
    ],
)
def test_golden_values(ratio: float, advantage: float, dual_clip: float | None, term: float, gradient: float) -> None:
    inputs = inputs_of([ratio], [advantage])
    terms = loss(inputs, PPOLossConfig(clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)).per_token
    terms.sum().backward()
    assert terms.item() == pytest.approx(term, abs=1e-12)
    assert inputs.log_probs.grad is not None
    assert inputs.log_probs.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_log_ratio_is_clamped() -> None:
    # Mutation: no clamp: exp(800) is inf.
    old = torch.tensor([[-800.0, 0.0]])
    inputs = LossInputs(
        log_probs=torch.tensor([[0.0, -800.0]]),
        old_log_probs=old,
        rollout_log_probs=old,
        advantages=torch.tensor([[-1.0, 1.0]]),
        mask=torch.ones(1, 2, dtype=torch.bool),
    )
    terms = loss(inputs, PPOLossConfig(dual_clip=None)).per_token
    torch.testing.assert_close(terms, torch.tensor([[math.exp(20), -math.exp(-20)]]))


def test_clip_fractions() -> None:
    # 0.5 with A < 0: low. 1.5 with A > 0: high. 4 with A < 0: dual. The others, and the masked one, are in no share.
    # Mutation: count every ratio outside the bounds, whatever the sign of A.
    inputs = inputs_of(
        ratio=[0.5, 0.5, 1.5, 1.5, 4.0, 1.0, 0.5], advantage=[-1, 1, 1, -1, -1, 1, -1], mask=[True, True, True, True, True, True, False]
    )
    statistics = loss(inputs, PPOLossConfig()).statistics.result()
    assert statistics == pytest.approx({"policy/clip_fraction_low": 1 / 6, "policy/clip_fraction_high": 1 / 6, "policy/clip_fraction_dual": 1 / 6})
    assert "policy/clip_fraction_dual" not in loss(inputs, PPOLossConfig(dual_clip=None)).statistics.entries


def test_a_higher_upper_bound_cuts_less_off_above_and_nothing_less_below() -> None:
    """One batch, of advantages +1 and -1 at each ratio, under one bound after the other (DAPO's clip-higher)."""
    ratios = [0.7, 0.9, 1.1, 1.25, 1.4, 1.7]
    inputs = inputs_of(ratios * 2, [1.0] * 6 + [-1.0] * 6)
    found = [loss(inputs, PPOLossConfig(clip_high=high, dual_clip=None)).statistics.result() for high in (0.2, 0.28, 0.6, 1e6)]
    # 1.25, 1.4 and 1.7 lie above 1.2, and so on. Mutation: clip_high for both bounds: 0.7 is not below 0.4.
    assert [12 * cut["policy/clip_fraction_high"] for cut in found] == pytest.approx([3, 2, 1, 0])
    assert [12 * cut["policy/clip_fraction_low"] for cut in found] == pytest.approx([1] * 4)


@pytest.mark.parametrize("high", [0.2, 0.28, 1e6])
def test_with_one_update_a_step_no_bound_is_felt(high: float) -> None:
    # Then every ratio is 1. Mutation: `>=` and 1 for the bound; or the rollout's log-probs for the old ones.
    inputs = inputs_of([1.0, 1.0], [2.0, -1.0])
    shifted = LossInputs(
        **{name: getattr(inputs, name) for name in ("log_probs", "old_log_probs", "advantages", "mask")}, rollout_log_probs=inputs.old_log_probs + 0.5
    )
    terms = loss(shifted, PPOLossConfig(clip_high=high))
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), shifted.log_probs)
    assert (terms.per_token.tolist(), gradient.tolist()) == ([[-2.0, 1.0]], [[-2.0, 1.0]])
    assert set(terms.statistics.result().values()) == {0.0}


@pytest.mark.parametrize("poison", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("where", ["log_probs", "old_log_probs", "advantages", "both"])
def test_a_masked_position_changes_nothing(poison: float, where: str) -> None:
    # Mutation: `(log_probs - old_log_probs) * mask`, or `exp` before `where`: NaN in the value or in the gradient.
    clean = inputs_of([1.5, 1.1, 0.7], [1, 2, -1], [True, True, False])
    loss(clean, PPOLossConfig()).per_token.sum().backward()

    columns = {
        "log_probs": clean.log_probs.detach().clone(),
        "old_log_probs": clean.old_log_probs.clone(),
        "advantages": clean.advantages.clone(),
    }
    for name in ("log_probs", "old_log_probs") if where == "both" else (where,):
        columns[name][0, 2] = poison
    columns["log_probs"].requires_grad_()
    poisoned = LossInputs(**columns, rollout_log_probs=clean.rollout_log_probs, mask=clean.mask)
    terms = loss(poisoned, PPOLossConfig())
    terms.per_token.sum().backward()

    assert torch.equal(terms.per_token, loss(clean, PPOLossConfig()).per_token)
    assert clean.log_probs.grad is not None
    assert poisoned.log_probs.grad is not None
    assert torch.equal(poisoned.log_probs.grad, clean.log_probs.grad)
    assert terms.statistics.result() == loss(clean, PPOLossConfig()).statistics.result()


def test_a_fault_on_a_response_token_stays_visible() -> None:
    # Mutation: nan_to_num anywhere: the optimizer would take a step on garbage.
    inputs = inputs_of([1.0, math.nan], [1, 1])
    assert loss(inputs, PPOLossConfig()).per_token.isnan().tolist() == [[False, True]]


def test_registered() -> None:
    assert LOSSES.get("ppo") is loss

"""KL estimators, and the agreement of trainer and rollout that is computed with them."""

import math

import pytest
import torch

from engine.algorithms import kl as kl_module
from engine.algorithms.kl import kl
from engine.algorithms.rollout_agreement import rollout_agreement
from engine.config import KLConfig
from engine.metrics import merge

ONE = torch.ones(1, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kind", "difference", "value"),
    [
        ("k1", 0.5, 0.5),
        ("abs", 0.5, 0.5),
        ("abs", -0.5, 0.5),  # Mutation: k1 gives -0.5.
        ("abs", -math.inf, 20.0),
        ("k2", 0.5, 0.125),
        ("k3", 0.5, 0.1065307),  # exp(-0.5) + 0.5 - 1. Mutation: exp(d) - d - 1 gives 0.1487213.
        ("k3", -0.5, 0.1487213),
        ("k1", 30.0, 20.0),
        ("k1", -math.inf, -20.0),
        ("k2", 30.0, 200.0),
        ("k3", 30.0, 10.0),  # 19 before its own clamp
        ("k3", -30.0, 10.0),
        # The value is the base's. Mutation: that of k2, 0.125 and 450.
        ("k1_k2grad", -0.5, -0.5),
        ("abs_k2grad", -0.5, 0.5),
        ("k3_k2grad", 0.5, 0.1065307),
        ("k3_k2grad", 30.0, 10.0),
    ],
)
def test_golden_values(kind: str, difference: float, value: float) -> None:
    estimate = kl(kind, torch.tensor([[difference - 1]], dtype=torch.float64), torch.tensor([[-1.0]], dtype=torch.float64), ONE)
    assert estimate.item() == pytest.approx(value, abs=1e-7)


def test_k3_of_a_tiny_difference_is_not_rounding_noise() -> None:
    # d^2 / 2 at d = 2^-13. Mutation: exp(-d) + d - 1 in float32 has steps of 6e-8, eight times the value.
    assert kl("k3", torch.tensor([[2.0**-13]]), torch.zeros(1, 1), ONE).item() == pytest.approx(2.0**-27, rel=0.2)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimators_agree_in_expectation_on_a_close_pair(kind: str) -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.49, 0.3, 0.21], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum()
    estimate = (policy * kl(kind, policy.log()[None], reference.log()[None], torch.ones(1, 3, dtype=torch.bool))).sum()
    # k1 and k3 are unbiased; k2 is right to second order.
    torch.testing.assert_close(estimate, exact, rtol=2e-2 if kind == "k2" else 1e-9, atol=0)


@pytest.mark.parametrize(
    ("kind", "difference", "gradient"),
    [
        ("k1", 0.5, 1.0),
        ("abs", 0.5, 1.0),
        ("abs", -0.5, -1.0),
        ("abs", 0.0, 0.0),
        ("k2", 0.5, 0.5),
        ("k3", 0.5, 0.3934693),  # 1 - exp(-0.5)
        ("k3", -0.5, -0.6487213),  # 1 - exp(0.5)
        ("k3", -3.0, 0.0),  # exp(3) - 3 - 1 = 16.1 stands above the clamp
        ("abs", 21.0, 0.0),
        # d k2 / d log_probs = d, whatever the base. Mutation: leave the base's gradient in: 1.5, -1.5, 0.8934693.
        ("k1_k2grad", 0.5, 0.5),
        ("abs_k2grad", -0.5, -0.5),
        ("k3_k2grad", 0.5, 0.5),
        ("k3_k2grad", -3.0, -3.0),  # k3's clamp cuts its value, not k2's gradient.
        ("k1_k2grad", 21.0, 0.0),
    ],
)
def test_gradients_as_a_loss_term(kind: str, difference: float, gradient: float) -> None:
    # Mutation: detach the difference, or let the reference carry the gradient: the sign changes.
    log_probs = torch.tensor([[difference - 1]], dtype=torch.float64, requires_grad=True)
    kl(kind, log_probs, torch.tensor([[-1.0]], dtype=torch.float64), ONE).sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(gradient, abs=1e-7)


@pytest.mark.parametrize("kind", ["k2", "k1_k2grad", "abs_k2grad", "k3_k2grad"])
def test_k2_has_the_gradient_of_the_divergence(kind: str) -> None:
    # Over the policy's own samples, the mean of d k2 = d log pi . log(pi / ref) is the gradient of KL(pi || ref) by the logits, exactly.
    # Mutation: k1 or k3 without `_k2grad`: the mean of k1's gradient is 0.
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.6, 0.1, 0.3], dtype=torch.float64).log()
    log_policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_policy.exp() * (log_policy - reference)).sum(), logits, retain_graph=True)
    drawn = kl(kind, log_policy[None], reference[None], torch.ones(1, 3, dtype=torch.bool))[0]
    (estimate,) = torch.autograd.grad((log_policy.detach().exp() * drawn).sum(), logits)
    torch.testing.assert_close(estimate, exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", kl_module.names())
@pytest.mark.parametrize("poison", [-math.inf, math.inf, math.nan])
def test_masked_positions_are_zero_and_have_no_gradient(kind: str, poison: float) -> None:
    # Mutation: multiply by the mask afterwards: NaN.
    log_probs = torch.tensor([[-1.0, poison]], requires_grad=True)
    estimate = kl(kind, log_probs, torch.tensor([[-2.0, -1.0]]), torch.tensor([[True, False]]))
    estimate.sum().backward()
    assert estimate[0, 1] == 0
    assert log_probs.grad is not None
    assert log_probs.grad[0, 1] == 0
    assert log_probs.grad[0, 0] != 0


def test_unknown_kind() -> None:
    assert kl_module.names() == sorted(KLConfig.model_fields["estimator"].annotation.__args__)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"'k4'\. There are: abs, abs_k2grad, k1, k1_k2grad, k2, k3, k3_k2grad"):
        kl("k4", torch.zeros(1, 1), torch.zeros(1, 1), ONE)


def test_rollout_agreement_golden_values() -> None:
    # d = trainer - rollout is ln 2 and 0 on the response tokens, huge and infinite elsewhere.
    # k3 of KL(rollout || trainer) = exp(d) - d - 1: (2 - ln 2 - 1 + 0) / 2. Mutation: swap the two: exp(-d) + d - 1 gives 0.0966.
    # Weights 2 and 1: (2 + 1)^2 / (2 (4 + 1)) = 0.9.
    rollout = torch.tensor([[-3.0, -1.0, -2.0, -1.0]])
    trainer = torch.tensor([[-9.0, -1.0 + math.log(2), -2.0, -math.inf]])
    mask = torch.tensor([[False, True, True, False]])
    result = rollout_agreement(trainer, rollout, mask).result()
    assert result == pytest.approx(
        {
            "policy/kl_rollout": (1 - math.log(2)) / 2,
            "policy/mean_log_prob_difference": math.log(2) / 2,
            "policy/max_log_prob_difference": math.log(2),
            "policy/rollout_effective_fraction": 0.9,
        },
        rel=1e-6,
    )


def test_rollout_agreement_merges_exactly() -> None:
    # Mutation: Mean of micro-batch means: rows of uneven length then weigh the same.
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(6, 5, generator=generator)
    trainer = rollout + 0.3 * torch.randn(6, 5, generator=generator)
    mask = torch.arange(5) < torch.tensor([5, 1, 0, 3, 2, 4])[:, None]
    whole = rollout_agreement(trainer, rollout, mask).result()
    parts = [rollout_agreement(trainer[rows], rollout[rows], mask[rows]) for rows in (slice(0, 2), slice(2, 3), slice(3, 6), slice(6, 6))]
    assert merge(parts).result() == pytest.approx(whole, rel=1e-12)


def test_rollout_disagreement_stays_visible() -> None:
    # Mutation: report the clamped difference (20), or let a NaN lose against a number.
    mask = torch.ones(1, 2, dtype=torch.bool)
    apart = rollout_agreement(torch.tensor([[-math.inf, -1.0]]), torch.tensor([[-1.0, -1.0]]), mask)
    assert apart.result()["policy/max_log_prob_difference"] == math.inf
    broken = rollout_agreement(torch.tensor([[math.nan, -1.0]]), torch.tensor([[-1.0, -1.0]]), mask)
    assert math.isnan(merge([broken, apart]).result()["policy/max_log_prob_difference"])
    assert math.isnan(merge([apart, broken]).result()["policy/max_log_prob_difference"])


def test_rollout_agreement_without_response_tokens() -> None:
    result = rollout_agreement(torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)).result()
    assert result == {"policy/max_log_prob_difference": 0.0}

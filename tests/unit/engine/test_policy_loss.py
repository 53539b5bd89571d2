"""The policy's whole loss: KL, entropy and weights beside the policy term, aggregated alike and however the batch is cut."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.algorithms import aggregation
from engine.algorithms.aggregation import Denominators, count
from engine.algorithms.coefficients import Coefficients
from engine.algorithms.policy_loss import policy_loss
from engine.batch import Batch
from engine.config import AlgorithmConfig, EntropyConfig, ImportanceWeightsConfig, KLConfig, OffPolicyConfig
from engine.metrics import merge

COEFFICIENTS = Coefficients(kl=0.3, entropy=0.2)


def algorithm(estimator: str = "k3", how: str = "token_mean", **changes: Any) -> AlgorithmConfig:
    constant = {"aggregation_constant_tokens": 7} if how == "sequence_sum_constant" else {}
    values = {
        "loss": {"aggregation": how, **constant},
        "kl": KLConfig(coefficient=9.0, estimator=estimator),  # type: ignore[arg-type]
        "entropy": EntropyConfig(coefficient=9.0),
        "off_policy": OffPolicyConfig(weights=ImportanceWeightsConfig()),
    }
    return AlgorithmConfig.model_validate({**values, **changes})


@functools.cache
def step() -> Batch:
    """Uneven rows, one of them empty, one in two spans; poison where there is no token."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([6, 3, 0, 5, 2, 6, 1])[:, None]
    mask[3] = torch.tensor([False, True, True, False, True, False])

    def column(values: Tensor) -> Tensor:
        return torch.where(mask, values, torch.nan)

    return Batch(
        {
            "features": draw(7, 6, 4),
            "target": torch.randint(5, (7, 6), generator=generator),
            "response_mask": mask,
            "old_log_probs": column(-1 + 0.3 * draw(7, 6)),
            "rollout_log_probs": column(-1 + 0.3 * draw(7, 6)),
            "reference_log_probs": column(-1 + 0.3 * draw(7, 6)),
            "advantages": column(draw(7, 6)),
            "off_policy_weights": torch.where(mask, draw(7, 6).exp(), 1),
        }
    )


def gradient(parts: list[Batch], config: AlgorithmConfig, coefficients: Coefficients = COEFFICIENTS) -> tuple[dict[str, float], Tensor]:
    """Statistics and gradient of a linear policy over a step in these parts, of all ranks."""
    weight = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    denominators, found = sum((count(part.tensors["response_mask"]) for part in parts), Denominators(0, 0)), []
    for part in parts:
        log_softmax = torch.log_softmax(part.tensors["features"] @ weight, dim=-1)
        log_probs = log_softmax.gather(-1, part.tensors["target"][..., None])[..., 0]
        entropy = -(log_softmax.exp() * log_softmax).sum(-1) if coefficients.entropy else None
        value, statistics = policy_loss(part.tensors, log_probs, entropy, config, coefficients, denominators)
        value.backward()
        found.append(statistics)
    assert weight.grad is not None
    return merge(found).result(), weight.grad


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_k2grad"])
@pytest.mark.parametrize("how", aggregation.names())
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_gradient_does_not_know_how_the_batch_was_cut(estimator: str, how: str, size: int) -> None:
    # Mutation: the mean of a pass's own entropy or distance instead of `aggregated`.
    config = algorithm(estimator, how)
    whole, expected = gradient([step()], config)
    parts = [step().rows(slice(start, start + size)) for start in range(0, len(step()), size)]
    cut, found = gradient(parts, config)
    assert expected.abs().max() > 1e-3
    assert cut == pytest.approx(whole, rel=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_terms_by_hand() -> None:
    # One token: pi 1/4, old 1/4, reference 1/2, advantage 2, weight 1/2, entropy 1.5.
    # -2 x 1/2 + 0.3 log(1/4 / 1/2) - 0.2 x 1.5. Mutations: the weight on the KL as well (-1.196); the entropy added; the coefficient of the
    # configuration instead of the one in force.
    quarter = torch.tensor([[0.25]], dtype=torch.float64).log()
    columns = {
        "response_mask": torch.ones(1, 1, dtype=torch.bool),
        "old_log_probs": quarter,
        "rollout_log_probs": quarter,
        "reference_log_probs": quarter * 0.5,
        "advantages": torch.tensor([[2.0]], dtype=torch.float64),
        "off_policy_weights": torch.tensor([[0.5]], dtype=torch.float64),
    }
    entropy = torch.tensor([[1.5]], dtype=torch.float64)
    value, statistics = policy_loss(columns, quarter.clone().requires_grad_(), entropy, algorithm("k1"), COEFFICIENTS, Denominators(1, 1))
    assert value.item() == pytest.approx(-1 - 0.3 * 0.6931472 - 0.3)
    assert statistics.result()["policy/loss"] == pytest.approx(value.item())
    assert statistics.result()["policy/kl_reference"] == pytest.approx(-0.6931472)


@pytest.mark.parametrize("how", aggregation.names())
def test_each_term_adds_its_own_gradient(how: str) -> None:
    # The gradient is linear in both coefficients. Mutation: detach the entropy, or the distance.
    config = algorithm(how=how)

    def at(kl: float, entropy: float) -> Tensor:
        return gradient([step()], config, Coefficients(kl=kl, entropy=entropy))[1]

    both, neither, kl, entropy = at(0.3, 0.2), at(0.0, 0.0), at(0.3, 0.0), at(0.0, 0.2)
    assert (kl - neither).abs().max() > 1e-3
    assert (entropy - neither).abs().max() > 1e-3
    torch.testing.assert_close(both - neither, (kl - neither) + (entropy - neither), rtol=1e-10, atol=1e-14)


def test_weights_multiply_terms_as_constants() -> None:
    # Twice the weights, twice the policy term's gradient. Mutation: weights that leave the terms alone.
    config = algorithm(kl=None)
    none = replace(COEFFICIENTS, kl=0.0, entropy=0.0)
    doubled = step().with_tensors(off_policy_weights=2 * step().tensors["off_policy_weights"])
    torch.testing.assert_close(gradient([doubled], config, none)[1], 2 * gradient([step()], config, none)[1], rtol=1e-12, atol=1e-14)

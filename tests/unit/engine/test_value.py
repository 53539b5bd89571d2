"""Value loss: golden values and gradients, masked tokens, and statistics that merge."""

import math

import pytest
import torch
from torch import Tensor

from engine.algorithms.aggregation import aggregate, count
from engine.algorithms.value import loss
from engine.metrics import merge


def one(value: float, old: float, target: float, clip: float | None) -> tuple[float, float, float]:
    """Term, gradient and clip fraction of a single token."""
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    terms = loss(values, torch.tensor([[old]]).double(), torch.tensor([[target]]).double(), torch.ones(1, 1, dtype=torch.bool), clip)
    terms.per_token.sum().backward()
    assert values.grad is not None
    return terms.per_token.item(), values.grad.item(), terms.statistics.result()["critic/clip_fraction"]


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "term", "gradient", "cut"),
    [
        (0.6, 0.5, 1.0, 0.2, 0.08, -0.4, 0),  # within the clip: both are (.6 - 1)^2 / 2
        (0.9, 0.5, 1.0, 0.2, 0.045, 0.0, 1),  # moved further than the clip towards G: (.7 - 1)^2 / 2 is larger, and a constant
        (0.9, 0.5, 0.0, 0.2, 0.405, 0.9, 0),  # moved away from G: .9^2 / 2 is larger than .7^2 / 2, and pulls back. Mutation: min gives 0.245
        (1.5, 0.5, 1.0, 0.2, 0.125, 0.5, 0),  # past G, .5^2 / 2 against .3^2 / 2
        (0.9, 0.5, 1.0, None, 0.005, -0.1, 0),  # Mutation: clip at a default where it is None gives 0.045
        (0.1, 0.5, 0.0, 0.2, 0.045, 0.0, 1),  # downwards: clip(.1, .3, .7) = .3. Mutation: clamp from above alone gives 0.005
    ],
)
def test_golden_values(value: float, old: float, target: float, clip: float | None, term: float, gradient: float, cut: float) -> None:
    assert one(value, old, target, clip) == pytest.approx((term, gradient, cut), abs=1e-9)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_positions_have_no_effect(clip: float | None, poison: float) -> None:
    # Mutation: multiply by the mask afterwards: NaN, in the gradient too.
    values = torch.tensor([[0.5, poison]], requires_grad=True)
    broken = torch.tensor([[1.0, poison]])
    terms = loss(values, broken, broken, torch.tensor([[True, False]]), clip)
    terms.per_token.sum().backward()
    assert terms.per_token[0, 1] == 0
    assert values.grad is not None
    assert values.grad[0, 1] == 0
    assert values.grad[0, 0] != 0
    assert terms.statistics.result() == {"critic/clip_fraction": 0}


def test_only_values_have_a_gradient() -> None:
    # Mutation: compute the returns from the values that are trained: both move towards each other.
    tensors = [torch.rand(2, 3, requires_grad=True) for _ in range(3)]
    loss(*tensors, torch.ones(2, 3, dtype=torch.bool), None).per_token.sum().backward()
    torch.testing.assert_close(tensors[0].grad, (tensors[0] - tensors[2]).detach())


def _step() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    return values, old, returns, torch.arange(5) < torch.tensor([5, 1, 0, 3, 2, 4])[:, None]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
@pytest.mark.parametrize("cuts", [(6,), (2, 1, 3), (1,) * 6])
def test_micro_batches_add_up(cuts: tuple[int, ...], aggregation: str) -> None:
    # Mutation: a mean over the micro-batch; a row of one token then weighs as much as one of five.
    values, old, returns, mask = _step()
    mine = values.clone().requires_grad_()
    whole = values.clone().requires_grad_()
    denominators = count(mask)
    aggregate(loss(whole, old, returns, mask, 0.2).per_token, mask, denominators, aggregation).backward()
    parts = list(zip(*(tensor.split(cuts) for tensor in (mine, old, returns, mask)), strict=True))
    for part in parts:
        aggregate(loss(*part, 0.2).per_token, part[3], denominators, aggregation).backward()
    torch.testing.assert_close(mine.grad, whole.grad)
    merged = merge(loss(*part, 0.2).statistics for part in parts).result()
    assert merged == pytest.approx(loss(values, old, returns, mask, 0.2).statistics.result(), rel=1e-12)


def test_explained_variance_is_of_the_old_values_over_response_tokens() -> None:
    # Mutation: of the values being trained: it would grow within one step by training on the very tokens it is measured on.
    values, old, returns, mask = _step()
    kept = returns[mask]
    expected = 1 - (kept - old[mask]).var().item() / kept.var().item()
    assert loss(values, old, returns, mask, None).statistics.result()["critic/explained_variance"] == pytest.approx(expected)


def test_without_response_tokens() -> None:
    terms = loss(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool), 0.2)
    assert terms.per_token.eq(0).all()
    assert terms.statistics.result() == {}

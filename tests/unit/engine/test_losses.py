"""Every policy loss beside PPO: golden values with their derivation; and what holds for all of them, by the registry.

How a batch is cut, empty rows and observation tokens are in test_aggregation.py, PPO's own values in test_ppo.py.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from engine.algorithms import clip_cov, kl_cov
from engine.algorithms.aggregation import aggregate, count
from engine.algorithms.covariance import covariances
from engine.algorithms.registry import LOSSES, SELECTIONS
from engine.algorithms.types import LossInputs, LossTerms
from engine.config import ClipCovLossConfig, KLCovLossConfig, LossConfig

CUT = ["policy/clip_fraction_low", "policy/clip_fraction_high"]


def config_of(name: str, **parameters: Any) -> LossConfig:
    return TypeAdapter(LossConfig).validate_python({"name": name, **parameters})


def inputs_of(ratio: list[float], advantage: list[float], selected: list[bool] | None = None) -> LossInputs:
    """One row whose tokens had the log-prob -1 at the start of the step; the rollout said -0.5."""
    old = torch.full((1, len(ratio)), -1.0, dtype=torch.float64)
    return LossInputs(
        log_probs=(old + torch.tensor([ratio], dtype=torch.float64).log()).requires_grad_(),
        old_log_probs=old,
        rollout_log_probs=old + 0.5,
        advantages=torch.tensor([advantage], dtype=torch.float64),
        mask=torch.ones(1, len(ratio), dtype=torch.bool),
        selected=torch.tensor([selected or [False] * len(ratio)]),
    )


def run(name: str, inputs: LossInputs, **parameters: Any) -> LossTerms:
    return LOSSES.get(name)(inputs, config_of(name, **parameters))


def terms_and_gradient(name: str, inputs: LossInputs, **parameters: Any) -> tuple[list[float], list[float]]:
    """The terms of one row, and the gradient of their sum."""
    terms = run(name, inputs, **parameters).per_token
    (gradient,) = torch.autograd.grad(terms.sum(), inputs.log_probs)
    return terms[0].tolist(), gradient[0].tolist()


def close(found: tuple[list[float], list[float]], terms: list[float], gradient: list[float]) -> bool:
    return found == (pytest.approx(terms, abs=1e-7), pytest.approx(gradient, abs=1e-7))


# Golden values. d is the log-ratio.


def test_gspo() -> None:
    # d = .2 .4: s = e^.3 = 1.3498588 for both tokens; each token's own gradient is -A s. Mutation: sum for mean (e^.6 = 1.82).
    pair = inputs_of([math.exp(0.2), math.exp(0.4)], [1, 1])
    assert close(terms_and_gradient("gspo", pair, clip_high=0.5), [-1.3498588] * 2, [-1.3498588] * 2)
    # The paper's bound of 4e-4: 1.0004 and no gradient; below, for A < 0, 1 - 3e-4. Mutation: swap them.
    assert close(terms_and_gradient("gspo", pair), [-1.0004] * 2, [0, 0])
    down = inputs_of([math.exp(-0.2), math.exp(-0.4)], [-1, -1])
    assert close(terms_and_gradient("gspo", down), [0.9997] * 2, [0, 0])
    # One token far up, one as far down: the sequence stays at 1, and nothing is cut. Mutation: a ratio by token.
    assert close(terms_and_gradient("gspo", inputs_of([8, 0.125], [1, 1])), [-1, -1], [-1, -1])
    # mean d = 15 counts as 10: e^10 = 22026.4657948, where there is no gradient any more.
    far = inputs_of([math.exp(15)], [-1])
    assert close(terms_and_gradient("gspo", far), [22026.4657948], [0])
    assert run("gspo", pair).statistics.result() == {CUT[0]: 0, CUT[1]: 1}


@given(logs=st.lists(st.floats(-0.3, 0.3), min_size=1, max_size=5), advantage=st.sampled_from([-2.0, 0.5]))
def test_gspo_and_gmpo_have_the_gradient_of_their_sequence_ratio(logs: list[float], advantage: float) -> None:
    # Inside the bounds both are -A exp(mean d), gradient included, once their terms are averaged over the sequence.
    # Mutation: gspo without the gradient through lp; gmpo's term on one token only.
    inputs = inputs_of([math.exp(value) for value in logs], [advantage] * len(logs))
    expected = -advantage * (inputs.log_probs - inputs.old_log_probs).mean().exp()
    (gradient,) = torch.autograd.grad(expected, inputs.log_probs)
    for name, bounds in (("gspo", {"clip_low": 0.9, "clip_high": 9.0}), ("gmpo", {})):
        found = aggregate(run(name, inputs, **bounds).per_token, inputs.mask, count(inputs.mask), "sequence_mean_token_mean")
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, inputs.log_probs)[0], gradient)


def test_gmpo() -> None:
    # A = 1: e = .2 and min(.6, .4): mean .3, both tokens carry -e^.3; of their sum 2 x -e^.3 x 1/2 reaches the first token, none the second.
    # Mutation: clip the mean (e^.4 x ...): -1.4918.
    assert close(terms_and_gradient("gmpo", inputs_of([math.exp(0.2), math.exp(0.6)], [1, 1])), [-1.3498588] * 2, [-1.3498588, 0])
    # A = -1: e = max(-.6, -.4) and max(.6, .4): mean .1. Mutation: min for both signs: mean -.1.
    assert close(terms_and_gradient("gmpo", inputs_of([math.exp(-0.6), math.exp(0.6)], [-1, -1])), [1.1051709] * 2, [0, 1.1051709])
    statistics = run("gmpo", inputs_of([math.exp(0.2), math.exp(0.6)], [1, 1])).statistics.result()
    assert statistics == {CUT[0]: 0, CUT[1]: 0.5}


def test_sapo() -> None:
    # f(1) = 4 / tau x 1/2, f'(1) = 1 whatever tau. Mutation: leave out 4 / tau: a quarter of the gradient.
    assert close(terms_and_gradient("sapo", inputs_of([1, 1], [1, -1])), [-2, 4 / 1.05 / 2], [-1, 1])
    # rho 2, A 1: 4 sigmoid(1) = 2.9242343; gradient 4 x .7310586 x .2689414 x rho = 1.5728955.
    # A -1, tau 1.05: 3.8095238 x sigmoid(1.05) = 3.8095238 x .7407749 = 2.8219996; gradient 4 x .7407749 x .2592251 x 2 = 1.5362205.
    found = terms_and_gradient("sapo", inputs_of([2, 2], [1, -1]))
    assert found[0] == pytest.approx([-2.9242343, 2.8219996], abs=2e-7)
    assert found[1] == pytest.approx([-1.5728955, 1.5362205], abs=1e-6)
    gate = run("sapo", inputs_of([2, 1], [1, 1])).statistics.result()
    assert gate == {"policy/gate": pytest.approx((4 * 0.7310586 * 0.2689414 + 1) / 2, abs=1e-6)}


def test_cispo() -> None:
    # rho 1.5 counts as 1.28; lp = -1 + ln 1.5 = -.5945349. The gradient is the weight, it is never cut. Mutation: gradient through the ratio.
    assert close(terms_and_gradient("cispo", inputs_of([1.5], [1]), clip_high=0.28), [1.28 * -0.5945349 * -1], [-1.28])
    # No lower bound unless asked for: .5, or .8.
    assert close(terms_and_gradient("cispo", inputs_of([0.5], [1])), [0.5 * 1.6931472], [-0.5])
    assert close(terms_and_gradient("cispo", inputs_of([0.5], [1]), clip_low=0.2), [0.8 * 1.6931472], [-0.8])
    # Whatever the advantage.
    statistics = run("cispo", inputs_of([1.5, 0.5, 1, 1], [-1, 1, 1, 1]), clip_low=0.2, clip_high=0.28).statistics.result()
    assert statistics == {CUT[0]: 0.25, CUT[1]: 0.25}


@pytest.mark.parametrize("name", ["reinforce", "gpg"])
def test_reinforce(name: str) -> None:
    # Mutation: the ratio in place of the log-prob: value -A rho, gradient -A rho.
    assert close(terms_and_gradient(name, inputs_of([math.e, 1], [2, -1])), [0, -1], [-2, 1])


def test_clip_cov() -> None:
    # PPO, -1.1 and -1.28 (cut); the selected tokens have neither value nor gradient. Mutation: select outside of what was selected.
    inputs = inputs_of([1.1, 1.5, 1.1], [1, 1, 1], [False, False, True])
    assert close(terms_and_gradient("clip_cov", inputs), [-1.1, -1.28, 0], [-1.1, 0, 0])
    assert run("clip_cov", inputs).statistics.result()["policy/clip_fraction_covariance"] == pytest.approx(1 / 3)


def test_kl_cov() -> None:
    # Selected, rho 1.5: -1.5 + .5 ln 1.5 = -1.2972674, gradient -1.5 + .5; rho .5, A -1: .5 + .5 ln 2 = .8465736, gradient .5 - .5.
    # Not selected: -1.5, no clip. Mutation: d for |d|: .1534264 in the second.
    inputs = inputs_of([1.5, 0.5, 1.5], [1, -1, 1], [True, True, False])
    assert close(terms_and_gradient("kl_cov", inputs, coefficient=0.5), [-1.2972674, 0.8465736, -1.5], [-1, 0, -1.5])
    assert run("kl_cov", inputs).statistics.result() == {"policy/kl_covariance_fraction": pytest.approx(2 / 3)}


def test_dppo() -> None:
    # The rollout's log-probs are .5 above: rho 1.5 to the old policy is 1.5 e^-.5 = .9097960 to the rollout's, inside the bounds; rho 1 is
    # .6065307, below them. Mutation: olp for rlp: -1.28 and 1.
    assert close(terms_and_gradient("dppo", inputs_of([1.5, 1], [1, -1])), [-0.9097960, 0.8], [-0.9097960, 0])


# Selection of tokens from a whole step.


def test_covariances() -> None:
    # lp -1 -3, A 2 0: means -2 and 1: (1)(1) and (-1)(-1). Mutation: a mean left out: 2 and 0, or -1 and 3.
    assert covariances(torch.tensor([-1.0, -3.0]), torch.tensor([2.0, 0.0])).tolist() == [1, 1]


def test_kl_cov_selects_the_largest() -> None:
    covariance = torch.tensor([0.1, 5, -9, 5, 2, 0, 0, 0, 0, 0], dtype=torch.float64)

    def chosen(fraction: float) -> list[int]:
        config = KLCovLossConfig(name="kl_cov", fraction=fraction)
        return kl_cov.select(covariance, config, np.random.default_rng(0)).nonzero().flatten().tolist()

    # Mutations: the smallest, the largest in size (the -9), or rounding up.
    assert [chosen(0.1), chosen(0.25), chosen(0.3), chosen(0.05)] == [[1], [1, 3], [1, 3, 4], []]


def test_clip_cov_selects_evenly_in_the_band() -> None:
    # Ten tokens, of which four lie between 1 and 5, bounds excluded; two of them are drawn.
    covariance = torch.tensor([1, 1.5, 2, 3, 4.9, 5, 0, 9, -2, 0], dtype=torch.float64)
    config = ClipCovLossConfig(name="clip_cov", fraction=0.2)
    drawn = torch.stack([clip_cov.select(covariance, config, np.random.default_rng(seed)) for seed in range(400)])
    assert drawn.sum(dim=1).eq(2).all()
    # Each in half of the draws: 200 +- 10, five deviations. Mutation: the first of the band always.
    assert (drawn.sum(dim=0)[1:5] - 200).abs().max() < 50
    assert drawn.sum(dim=0)[[0, 5, 6, 7, 8, 9]].eq(0).all()
    assert torch.equal(drawn[7], clip_cov.select(covariance, config, np.random.default_rng(7)))
    # More wanted than there are: all of the band.
    everything = ClipCovLossConfig(name="clip_cov", fraction=1.0)
    assert clip_cov.select(covariance, everything, np.random.default_rng(0)).nonzero().flatten().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("name", SELECTIONS.names())
def test_a_loss_that_selects_needs_the_selection(name: str) -> None:
    with pytest.raises(ValueError, match="selected is missing"):
        run(name, replace(inputs_of([1], [1]), selected=None))
    assert SELECTIONS.get(name)(torch.zeros(0), config_of(name), np.random.default_rng(0)).tolist() == []


# What holds for every loss.


def batch(seed: int = 0) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(4, 6, generator=generator, dtype=torch.float64)

    log_probs = (normal() - 2).requires_grad_()
    old = log_probs.detach() + normal() / 3
    return LossInputs(
        log_probs=log_probs,
        old_log_probs=old,
        rollout_log_probs=old + normal() / 3,
        advantages=normal(),
        mask=torch.rand(4, 6, generator=generator) < 0.7,
        selected=torch.rand(4, 6, generator=generator) < 0.3,
    )


@pytest.mark.parametrize("name", LOSSES.names())
@pytest.mark.parametrize("poison", [-math.inf, math.inf, math.nan])
def test_a_masked_position_changes_nothing(name: str, poison: float) -> None:
    # Rule 2. Mutation: `tensor * mask`, or `where` after `exp`, in any loss: NaN in the value or in the gradient.
    clean = batch()
    columns = {key: getattr(clean, key).detach() for key in ("log_probs", "old_log_probs", "rollout_log_probs", "advantages")}
    spoilt = {key: tensor.where(clean.mask, poison) for key, tensor in columns.items()}
    for key in [*spoilt, "all"]:
        given_ = spoilt if key == "all" else {**columns, key: spoilt[key]}
        inputs = LossInputs(**given_ | {"log_probs": given_["log_probs"].clone().requires_grad_()}, mask=clean.mask, selected=clean.selected)
        found, expected = run(name, inputs), run(name, clean)
        assert torch.equal(found.per_token, expected.per_token)
        assert found.per_token[~clean.mask].eq(0).all()
        gradients = [torch.autograd.grad(terms.per_token.sum(), of.log_probs)[0] for terms, of in ((found, inputs), (expected, clean))]
        assert torch.equal(*gradients)
        assert found.statistics.result() == expected.statistics.result()


@pytest.mark.parametrize("name", LOSSES.names())
def test_at_the_start_of_a_step_the_gradient_is_reinforces(name: str) -> None:
    # lp = olp = rlp, one advantage a sequence: -A for each token, as a share of its sequence's mean. Mutation: a factor in any loss.
    inputs = batch()
    old = inputs.log_probs.detach()
    same = replace(
        inputs,
        old_log_probs=old,
        rollout_log_probs=old,
        advantages=inputs.advantages[:, :1].expand(4, 6),
        selected=torch.zeros_like(inputs.mask) if name == "clip_cov" else inputs.selected,
    )
    loss = aggregate(run(name, same).per_token, same.mask, count(same.mask), "sequence_mean_token_mean")
    (gradient,) = torch.autograd.grad(loss, inputs.log_probs)
    lengths = same.mask.sum(dim=1, keepdim=True)
    torch.testing.assert_close(gradient, torch.where(same.mask, -same.advantages / lengths / lengths.gt(0).sum(), 0))


@pytest.mark.parametrize("name", LOSSES.names())
def test_a_fault_on_a_response_token_stays_visible(name: str) -> None:
    # Mutation: nan_to_num anywhere: the optimizer would take a step on garbage.
    inputs = inputs_of([math.nan, 1], [1, 1])
    assert run(name, inputs).per_token.isnan().any()


@pytest.mark.parametrize("name", LOSSES.names())
def test_no_ratio_is_too_large(name: str) -> None:
    # Mutation: `exp` of a log-ratio that is not clamped: inf.
    inputs = inputs_of([1, 1], [-1, 1])
    far = replace(inputs, log_probs=torch.tensor([[0.0, -900.0]], requires_grad=True), old_log_probs=torch.tensor([[-900.0, 0.0]]))
    far = replace(far, rollout_log_probs=far.old_log_probs)
    terms = run(name, far).per_token
    assert terms.isfinite().all()
    assert torch.autograd.grad(terms.sum(), far.log_probs)[0].isfinite().all()


@pytest.mark.parametrize("name", sorted(set(LOSSES.names()) - {"gpg", "reinforce"}))
def test_shares_are_of_response_tokens_and_merge_exactly(name: str) -> None:
    # Mutation: a mean over positions, or of means: the parts have unequal numbers of tokens.
    whole = batch()
    statistics = run(name, whole).statistics
    merged = None
    for rows in ([0], [1, 2], [3]):
        fields = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages", "mask", "selected")
        part = run(name, LossInputs(**{field: getattr(whole, field)[rows] for field in fields})).statistics
        merged = part if merged is None else merged
        if merged is not part:
            merged.update(part)
    assert merged is not None
    assert statistics.entries
    assert merged.result() == pytest.approx(statistics.result())

"""Policy losses beside verl's and TRL's, value and gradient: docs/parity.md says what the differences are."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from drawn import SEEDS, Step, differ, same, step
from theirs import GMPOTrainer, GRPOTrainer, RLOOTrainer, gradient, trl_loss, verl_loss
from torch import Tensor

from engine.algorithms import off_policy
from engine.algorithms.aggregation import aggregate, count
from engine.algorithms.covariance import covariances
from engine.algorithms.registry import LOSSES, SELECTIONS
from engine.algorithms.types import LossInputs
from engine.config import (
    CISPOLossConfig,
    ClipCovLossConfig,
    DPPOLossConfig,
    GMPOLossConfig,
    GPGLossConfig,
    GSPOLossConfig,
    ImportanceWeightsConfig,
    KLCovLossConfig,
    PPOLossConfig,
    ReinforceLossConfig,
    SAPOLossConfig,
)

Result = tuple[Tensor, Tensor]
SEQUENCES = "sequence_mean_token_mean"


def ours(drawn: Step, config: Any, weights: Tensor | None = None, selected: Tensor | None = None) -> Result:
    """Value and gradient, aggregated as the configuration says."""
    log_probs = drawn.log_probs.clone().requires_grad_()
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=drawn.old_log_probs,
        rollout_log_probs=drawn.rollout_log_probs,
        advantages=drawn.advantages,
        mask=drawn.mask,
        selected=selected,
    )
    terms = LOSSES.get(config.name)(inputs, config).per_token
    terms = terms if weights is None else terms * weights
    value = aggregate(terms, drawn.mask, count(drawn.mask), config.aggregation, config.aggregation_constant_tokens)
    return value.detach(), gradient(value, log_probs)


def one_advantage(drawn: Step) -> Step:
    """All tokens of a sample with the advantage of its first column, as group-relative estimators give them."""
    return replace(drawn, advantages=drawn.advantages[:, :1].expand_as(drawn.mask).contiguous())


def around_rollout(drawn: Step) -> Step:
    """The rollout's log-probs in place of the old ones."""
    return replace(drawn, old_log_probs=drawn.rollout_log_probs)


@dataclass(frozen=True)
class Case:
    """One loss of ours beside one of theirs."""

    config: Any
    theirs: Callable[[Step], Result]
    of_samples: bool = False
    """It is the same only where all tokens of a sample have one advantage."""
    tolerance: float = 1e-11


CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
UNBOUNDED = 1e9  # for verl, whose PPO cannot be without the dual clip
BY_SEQUENCE = {"aggregation": "seq-mean-token-mean"}
MEAN_OF_MEANS = 1e-7  # verl adds 1e-8 to the length of each sequence

CASES = {
    "ppo": Case(PPOLossConfig(), lambda drawn: verl_loss(drawn, "vanilla", **CLIPS, clip_ratio_c=3.0)),
    "ppo, tight dual clip": Case(PPOLossConfig(dual_clip=1.2), lambda drawn: verl_loss(drawn, "vanilla", **CLIPS, clip_ratio_c=1.2)),
    "ppo, no dual clip": Case(PPOLossConfig(dual_clip=None), lambda drawn: verl_loss(drawn, "vanilla", **CLIPS, clip_ratio_c=UNBOUNDED)),
    "ppo of TRL": Case(PPOLossConfig(dual_clip=None), lambda drawn: trl_loss(drawn, GRPOTrainer, loss_type="dapo")),
    # TRL bounds the ratio of positive advantages too, where the clip is tighter.
    "ppo of TRL, dual clip": Case(PPOLossConfig(dual_clip=1.5), lambda drawn: trl_loss(drawn, GRPOTrainer, loss_type="dapo", delta=1.5)),
    "dppo": Case(DPPOLossConfig(name="dppo"), lambda drawn: verl_loss(around_rollout(drawn), "vanilla", **CLIPS, clip_ratio_c=3.0)),
    "gspo": Case(
        GSPOLossConfig(name="gspo", clip_low=0.1, clip_high=0.15),
        lambda drawn: verl_loss(drawn, "gspo", **BY_SEQUENCE, clip_ratio_low=0.1, clip_ratio_high=0.15),
        tolerance=MEAN_OF_MEANS,
    ),
    "gspo of TRL": Case(
        GSPOLossConfig(name="gspo", clip_low=0.1, clip_high=0.15),
        lambda drawn: trl_loss(drawn, GRPOTrainer, importance_sampling_level="sequence", epsilon_low=0.1, epsilon_high=0.15),
        of_samples=True,
    ),
    "sapo": Case(
        SAPOLossConfig(name="sapo", aggregation=SEQUENCES, tau_positive=0.8, tau_negative=1.3),
        lambda drawn: verl_loss(drawn, "sapo", **BY_SEQUENCE, tau_pos=0.8, tau_neg=1.3),
        tolerance=MEAN_OF_MEANS,
    ),
    "sapo of TRL": Case(SAPOLossConfig(name="sapo", aggregation=SEQUENCES), lambda drawn: trl_loss(drawn, GRPOTrainer, loss_type="sapo")),
    "cispo": Case(
        CISPOLossConfig(name="cispo", clip_low=0.3, clip_high=0.4), lambda drawn: verl_loss(drawn, "cispo", clip_ratio_low=0.3, clip_ratio_high=0.4)
    ),
    "cispo, no lower bound": Case(
        CISPOLossConfig(name="cispo", clip_high=0.4), lambda drawn: verl_loss(drawn, "cispo", clip_ratio_low=1.0, clip_ratio_high=0.4)
    ),
    # TRL's epsilon_high is the bound itself, not what is added to 1.
    "cispo of TRL": Case(
        CISPOLossConfig(name="cispo", clip_high=0.4), lambda drawn: trl_loss(drawn, GRPOTrainer, loss_type="cispo", epsilon_high=1.4)
    ),
    "gmpo": Case(
        GMPOLossConfig(name="gmpo", clip_low=0.2, clip_high=0.3),
        lambda drawn: verl_loss(drawn, "geo_mean", clip_ratio_low=0.2, clip_ratio_high=0.3),
        tolerance=MEAN_OF_MEANS,
    ),
    "gmpo of TRL": Case(
        GMPOLossConfig(name="gmpo", clip_low=0.2, clip_high=0.3),
        lambda drawn: trl_loss(drawn, GMPOTrainer, epsilon_low=0.2, epsilon_high=0.3),
        of_samples=True,
    ),
    "gpg": Case(GPGLossConfig(name="gpg"), lambda drawn: verl_loss(drawn, "gpg")),
    "reinforce": Case(ReinforceLossConfig(name="reinforce"), lambda drawn: verl_loss(drawn, "gpg")),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_loss(name: str, seed: int) -> None:
    # Mutations, each red here: clip_low and clip_high exchanged in engine/algorithms/ratio.py; the dual clip for all advantages in ppo; the ratio not
    # detached in cispo; the token's own ratio in gspo; the mean over columns in gmpo; tau_negative for A > 0 in sapo; old for rollout in dppo.
    case = CASES[name]
    drawn = one_advantage(step(seed)) if case.of_samples else step(seed)
    value, slope = ours(drawn, case.config)
    their_value, their_slope = case.theirs(drawn)
    same(value, their_value, case.tolerance)
    same(slope, their_slope, case.tolerance)
    assert slope.abs().max() > 1e-3


def test_every_loss_is_compared() -> None:
    assert {case.config.name for case in CASES.values()} | set(SELECTIONS.names()) == set(LOSSES.names())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weighted_loss(level: str, seed: int) -> None:
    # Mutation: the weights as a part of the graph, or multiplied after the aggregation.
    drawn = step(seed)
    weights = off_policy.weights(drawn.old_log_probs, drawn.rollout_log_probs, drawn.mask, ImportanceWeightsConfig(level=level, cap=1.5))
    value, slope = ours(drawn, PPOLossConfig(dual_clip=None), weights)
    for their_value, their_slope in (
        verl_loss(drawn, "vanilla", **CLIPS, clip_ratio_c=UNBOUNDED, weights=weights),
        trl_loss(drawn, GRPOTrainer, loss_type="dapo", weights=weights),
    ):
        same(value, their_value)
        same(slope, their_slope)


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_loss_of_trl(seed: int) -> None:
    # TRL's is PPO on the ratio of the whole answer, the product over its tokens, which no loss of ours has. Where the policy has not moved yet, its
    # gradient is that of REINFORCE with the sum over each sequence.
    drawn = one_advantage(step(seed))
    drawn = replace(drawn, log_probs=drawn.old_log_probs)
    slope = ours(drawn, ReinforceLossConfig(name="reinforce", aggregation="sequence_mean_token_sum"))[1]
    same(slope, trl_loss(drawn, RLOOTrainer)[1])


# -- losses that select tokens


def band(drawn: Step, log_probs: Tensor, low: float = 0.2, high: float = 2.0) -> Tensor:
    """[B, T] bool: tokens whose covariance lies between the two."""
    covariance = torch.zeros(drawn.mask.shape, dtype=torch.float64)
    covariance[drawn.mask] = covariances(log_probs[drawn.mask], drawn.advantages[drawn.mask])
    return drawn.mask & (covariance > low) & (covariance < high)


def selected(drawn: Step, log_probs: Tensor, config: Any) -> Tensor:
    """[B, T] bool: what ours selects, by these log-probs."""
    chosen = SELECTIONS.get(config.name)(covariances(log_probs[drawn.mask], drawn.advantages[drawn.mask]), config, np.random.default_rng(0))
    return torch.zeros_like(drawn.mask).masked_scatter(drawn.mask, chosen)


def clip_cov(fraction: float) -> ClipCovLossConfig:
    return ClipCovLossConfig(name="clip_cov", fraction=fraction, covariance_low=0.2, covariance_high=2.0)


def clip_cov_of_verl(drawn: Step, fraction: float) -> Result:
    return verl_loss(drawn, "clip_cov", **CLIPS, clip_cov_ratio=fraction, clip_cov_lb=0.2, clip_cov_ub=2.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov(seed: int) -> None:
    # All tokens of the band, so that nothing is left to chance. Mutation: in engine/algorithms/clip_cov.py, `selected` turned round.
    drawn = replace(step(seed), log_probs=step(seed).old_log_probs)
    config = clip_cov(1.0)
    chosen = selected(drawn, drawn.old_log_probs, config)
    assert chosen.equal(band(drawn, drawn.old_log_probs))
    assert chosen.any()
    value, slope = ours(drawn, config, selected=chosen)
    their_value, their_slope = clip_cov_of_verl(drawn, 1.0)
    same(value, their_value)
    same(slope, their_slope)


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov_takes_some_of_the_band(seed: int) -> None:
    # Which ones is chance, in both; how many is not, and that they are of the band.
    drawn = replace(step(seed), log_probs=step(seed).old_log_probs)
    torch.manual_seed(seed)
    theirs = drawn.mask & (clip_cov_of_verl(drawn, 0.1)[1] == 0)
    chosen = selected(drawn, drawn.old_log_probs, clip_cov(0.1))
    inside = band(drawn, drawn.old_log_probs)
    assert chosen.sum() == theirs.sum() == min(math.floor(0.1 * int(drawn.mask.sum())), int(inside.sum()))
    assert (chosen <= inside).all()
    assert (theirs <= inside).all()


def kl_cov(fraction: float) -> KLCovLossConfig:
    return KLCovLossConfig(name="kl_cov", fraction=fraction, coefficient=0.5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fraction", [0.05, 0.3])
def test_kl_cov(fraction: float, seed: int) -> None:
    # The tokens that verl selects, by the policy being trained, given to ours. Mutation: in engine/algorithms/kl_cov.py, the smallest covariances.
    drawn = step(seed)
    value, slope = ours(drawn, kl_cov(fraction), selected=selected(drawn, drawn.log_probs, kl_cov(fraction)))
    their_value, their_slope = verl_loss(drawn, "kl_cov", kl_cov_ratio=fraction, ppo_kl_coef=0.5)
    same(value, their_value)
    same(slope, their_slope)
    # Ours are selected once a step, by the policy that it begins with; verl's anew in each micro-batch.
    differ(slope, ours(drawn, kl_cov(fraction), selected=selected(drawn, drawn.old_log_probs, kl_cov(fraction)))[1])


def test_selection_of_a_small_fraction() -> None:
    # Of some hundred tokens 0.1 % are none; verl takes one in every micro-batch, which in small ones is many times the fraction.
    drawn = replace(step(0), log_probs=step(0).old_log_probs)
    assert not selected(drawn, drawn.old_log_probs, clip_cov(1e-3)).any()
    assert not selected(drawn, drawn.old_log_probs, kl_cov(1e-3)).any()
    assert (drawn.mask & (clip_cov_of_verl(drawn, 1e-3)[1] == 0)).sum() == 1
    moved = step(0)
    without = ours(moved, kl_cov(1e-3), selected=torch.zeros_like(moved.mask))[1]
    assert (verl_loss(moved, "kl_cov", kl_cov_ratio=1e-3, ppo_kl_coef=0.5)[1] - without).abs().gt(1e-12).sum() == 1


# -- differences


def test_sapo_of_verl_ignores_its_aggregation() -> None:
    drawn = step(0)
    assert verl_loss(drawn, "sapo", "token-mean")[0] == verl_loss(drawn, "sapo", "seq-mean-token-mean")[0]
    differ(ours(drawn, SAPOLossConfig(name="sapo"))[0], ours(drawn, SAPOLossConfig(name="sapo", aggregation=SEQUENCES))[0])


def test_gmpo_of_verl_ignores_the_rest_of_the_step() -> None:
    # Its mean is over the rows of the micro-batch, whatever it is told of the batch, and rows without a response token count.
    drawn, told = step(0, empty=6), {"dp_size": 1, "batch_num_tokens": 1000, "global_batch_size": 500}
    rows = len(drawn.mask)
    settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
    theirs = verl_loss(drawn, "geo_mean", **settings, global_batch=told)[0]
    same(ours(drawn, GMPOLossConfig(name="gmpo", clip_low=0.2, clip_high=0.3))[0] * (rows - 6) / rows, theirs, MEAN_OF_MEANS)


def test_gmpo_of_verl_weighs_sequences() -> None:
    # Its off-policy weight is the geometric mean of the tokens', after their truncation; ours weighs each token's term.
    drawn = step(1)
    weights = off_policy.weights(drawn.old_log_probs, drawn.rollout_log_probs, drawn.mask, ImportanceWeightsConfig(cap=1.5))
    mean = torch.where(drawn.mask, weights.log(), 0).sum(1, keepdim=True) / drawn.mask.sum(1, keepdim=True)
    settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
    theirs = verl_loss(drawn, "geo_mean", **settings, weights=weights)[0]
    config = GMPOLossConfig(name="gmpo", clip_low=0.2, clip_high=0.3)
    same(ours(drawn, config, mean.exp())[0], theirs, MEAN_OF_MEANS)
    differ(ours(drawn, config, weights)[0], theirs)


def test_dppo_of_verl_bounds_probabilities() -> None:
    # verl's two are the paper's masks by total variation and by KL; ours is PPO's clip around the rollout's policy.
    drawn = step(0)
    for name in ("dppo_tv", "dppo_kl"):
        differ(ours(drawn, DPPOLossConfig(name="dppo"))[1], verl_loss(around_rollout(drawn), name, **CLIPS)[1])


def test_ratios_that_are_far_off() -> None:
    # 90 nats: the ratios of ours and of verl's PPO are at most exp(20); TRL's is infinite in float32, and infinity times a masked 0 no number.
    drawn = replace(step(0), **{name: getattr(step(0), name).float() for name in ("log_probs", "old_log_probs", "advantages")})
    far = replace(drawn, old_log_probs=drawn.log_probs - 90, advantages=-drawn.advantages.abs())
    assert ours(far, PPOLossConfig(dual_clip=None))[0].isfinite()
    assert verl_loss(far, "vanilla", **CLIPS, clip_ratio_c=UNBOUNDED)[0].isfinite()
    assert not trl_loss(far, GRPOTrainer, loss_type="dapo")[0].isfinite()


POISONED = {"vanilla": False, "gspo": True, "sapo": True, "cispo": True, "geo_mean": True, "gpg": False, "clip_cov": True, "kl_cov": True}
"""verl's losses, and whether a token that does not count makes a gradient no number."""


def poisoned(drawn: Step) -> Step:
    """-inf in all log-probs outside the mask, as a sampler that forbids tokens gives them: -inf - -inf is no number."""
    names = ("log_probs", "old_log_probs", "rollout_log_probs")
    return replace(drawn, **{name: torch.where(drawn.mask, getattr(drawn, name), -math.inf) for name in names})


@pytest.mark.parametrize("name", CASES)
def test_tokens_that_do_not_count(name: str) -> None:
    # Mutation: in engine/algorithms/ratio.py, `sequence_mean` multiplies by the mask: gspo and gmpo give NaN.
    for clean, dirty in zip(ours(step(0), CASES[name].config), ours(poisoned(step(0)), CASES[name].config), strict=True):
        assert clean.equal(dirty)


@pytest.mark.parametrize("name", POISONED)
def test_tokens_that_do_not_count_in_verl(name: str) -> None:
    value, slope = verl_loss(poisoned(step(0)), name)
    assert (not (value.isfinite() and slope.isfinite().all())) == POISONED[name]

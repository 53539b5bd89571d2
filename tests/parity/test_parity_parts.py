"""KL estimators, aggregations, the value loss and the off-policy correction beside verl's and TRL's: docs/parity.md says what the differences are."""

import math
from dataclasses import replace

import pytest
import torch
from drawn import SEEDS, Step, differ, same, step
from theirs import GRPOTrainer, gradient, trl_advantages, trl_loss, verl, verl_off_policy
from torch import Tensor

from engine.algorithms import off_policy, value
from engine.algorithms.aggregation import Denominators, aggregate, count
from engine.algorithms.coefficients import adapted_kl
from engine.algorithms.kl import kl
from engine.algorithms.kl import names as kl_names
from engine.config import AdaptiveKLConfig, ImportanceWeightsConfig, RejectionConfig

# -- KL estimators


VERL_KL = {"k1": "k1", "abs": "abs", "k2": "k2", "k3": "k3", "k1_k2grad": "k1+", "abs_k2grad": "abs+", "k3_k2grad": "k3+"}


def test_every_kl_estimator_is_compared() -> None:
    assert set(VERL_KL) == set(kl_names())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", VERL_KL)
def test_kl_value_and_gradient(kind: str, seed: int) -> None:
    # Mutations, in engine/algorithms/kl.py: the difference turned round (reference - policy): k1 and k3 differ, and all gradients; a `_k2grad` with
    # its own gradient.
    drawn = step(seed)
    log_probs = drawn.log_probs.clone().requires_grad_()
    ours = kl(kind, log_probs, drawn.reference_log_probs, drawn.mask)
    theirs = verl.kl_penalty(log_probs, drawn.reference_log_probs, VERL_KL[kind])
    same(ours[drawn.mask], theirs[drawn.mask])
    same(gradient(ours.sum(), log_probs), gradient(theirs[drawn.mask].sum(), log_probs))


@pytest.mark.parametrize("seed", SEEDS)
def test_kl_term_in_the_loss(seed: int) -> None:
    # Mutation: in engine/algorithms/kl.py, k3 as exp(d) - d - 1.
    drawn = replace(step(seed), advantages=torch.zeros_like(step(seed).advantages))
    log_probs = drawn.log_probs.clone().requires_grad_()
    ours = 0.3 * aggregate(kl("k3", log_probs, drawn.reference_log_probs, drawn.mask), drawn.mask, count(drawn.mask), "token_mean")
    theirs, their_gradient = trl_loss(drawn, GRPOTrainer, loss_type="dapo", beta=0.3)
    same(ours.detach(), theirs)
    same(gradient(ours, log_probs), their_gradient)


def test_kl_of_policies_that_are_far_apart() -> None:
    # Beyond 20 nats ours are constant; verl clamps for k3 alone, and TRL not at all, so that one token can be 10^13 and its gradient too.
    far, zero, mask = torch.tensor([[-30.0]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    assert [kl(kind, far, zero, mask).item() for kind in ("k1", "k2", "k3")] == [-20, 200, 10]
    assert [verl.kl_penalty(far, zero, kind).item() for kind in ("k1", "k2", "k3")] == [-30, 450, 10]
    drawn = step(0)
    apart = replace(drawn, advantages=torch.zeros_like(drawn.advantages), reference_log_probs=drawn.log_probs + 30)
    assert trl_loss(apart, GRPOTrainer, loss_type="dapo", beta=1.0)[0] > 1e12


def test_kl_of_policies_that_nearly_agree() -> None:
    # d = 2^-13 in float32, k3 = 7.45e-9. verl's exp(-d) + d - 1 is rounded to a multiple of 6e-8: 0.
    near = torch.tensor([[2.0**-13]])
    assert kl("k3", near, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)).item() == pytest.approx(2.0**-27, rel=0.01)
    assert abs(verl.kl_penalty(near, torch.zeros(1, 1), "k3").item() - 2.0**-27) > 2.0**-28


def test_kl_of_a_token_that_does_not_count() -> None:
    # -inf outside the mask, as a sampler that forbids tokens gives it. verl's aggregation takes it out after the gradient has become NaN.
    log_probs = torch.tensor([[-1.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    reference, mask = torch.tensor([[-1.5, -1.0]], dtype=torch.float64), torch.tensor([[True, False]])
    ours = aggregate(kl("k2", log_probs, reference, mask), mask, count(mask), "token_mean")
    theirs = verl.agg_loss(verl.kl_penalty(log_probs, reference, "k2"), mask, "token-mean")
    same(ours, theirs)
    same(gradient(ours, log_probs), torch.tensor([[0.5, 0.0]]))
    assert gradient(theirs, log_probs).isnan().tolist() == [[False, True]]


def adapted(distance: float, samples: int) -> tuple[float, float]:
    """The coefficient 0.1 after one step, ours and verl's."""
    controller = verl.AdaptiveKLController(0.1, target_kl=0.05, horizon=1000)
    controller.update(distance, samples)
    return adapted_kl(0.1, distance, samples, AdaptiveKLConfig(target=0.05, horizon=1000)), controller.value


@pytest.mark.parametrize("distance", [0.0, 0.03, 0.049, 0.05, 0.052, 0.07, 3.0, -0.1])
@pytest.mark.parametrize("samples", [1, 64, 4999])
def test_adaptive_kl_coefficient(distance: float, samples: int) -> None:
    # Mutation: in engine/algorithms/coefficients.py, target / distance.
    found, theirs = adapted(distance, samples)
    assert found == pytest.approx(theirs, abs=1e-15)


def test_adaptive_kl_coefficient_stays_one() -> None:
    # Beyond 5 horizons a step verl's turns negative and rewards distance; a distance that is no number makes it none for ever.
    assert adapted(0.0, 6000) == (0.0, pytest.approx(-0.02))
    found, theirs = adapted(math.nan, 64)
    assert found == 0.1
    assert math.isnan(theirs)


# -- aggregations

VERL_AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "sequence_mean_token_mean": "seq-mean-token-mean",
    "sequence_sum_constant": "seq-mean-token-sum-norm",
}


def aggregated(terms: Tensor, mask: Tensor, how: str, denominators: Denominators) -> Tensor:
    return aggregate(terms, mask, denominators, how, constant=17 if how == "sequence_sum_constant" else None)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("empty", [0, 3])
@pytest.mark.parametrize("how", VERL_AGGREGATIONS)
def test_aggregation(how: str, empty: int, seed: int) -> None:
    # Mutation: in engine/algorithms/aggregation.py, `mask.shape[0]` in place of the sequences that are not empty: red with empty rows.
    drawn = step(seed, empty=empty)
    ours = aggregated(drawn.advantages, drawn.mask, how, count(drawn.mask))
    # verl adds 1e-8 to the length of each sequence.
    same(ours, verl.agg_loss(drawn.advantages, drawn.mask.long(), VERL_AGGREGATIONS[how], loss_scale_factor=17), tolerance=2e-8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", VERL_AGGREGATIONS)
def test_aggregation_of_micro_batches(how: str, seed: int) -> None:
    # verl's parts add up to the whole once they are told what the whole holds; without being told, each part is a mean of its own.
    drawn = step(seed)
    whole = count(drawn.mask)
    parts = [slice(0, 3), slice(3, 11), slice(11, None)]
    told = {"batch_num_tokens": whole.tokens, "global_batch_size": whole.sequences}

    def theirs(rows: slice, **more: int) -> Tensor:
        return verl.agg_loss(drawn.advantages[rows], drawn.mask[rows].long(), VERL_AGGREGATIONS[how], loss_scale_factor=17, **more)

    ours = torch.stack([aggregated(drawn.advantages[rows], drawn.mask[rows], how, whole) for rows in parts]).sum()
    same(ours, torch.stack([theirs(rows, **told) for rows in parts]).sum(), tolerance=2e-8)
    differ(ours, torch.stack([theirs(rows) for rows in parts]).mean())


TRL_AGGREGATIONS = {"dapo": "token_mean", "grpo": "sequence_mean_token_mean", "dr_grpo": "sequence_sum_constant", "luspo": "sequence_mean_token_sum"}


def trl_aggregation(drawn: Step, loss_type: str, **settings: int) -> tuple[Tensor, Tensor]:
    """TRL's loss where policy and old policy are the same: its terms are -A then, with the gradient -A, and only the aggregation is left."""
    return trl_loss(replace(drawn, old_log_probs=drawn.log_probs), GRPOTrainer, loss_type=loss_type, max_completion_length=17, **settings)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_type", TRL_AGGREGATIONS)
def test_aggregation_of_trl(loss_type: str, seed: int) -> None:
    # Mutation: in engine/algorithms/aggregation.py, `_sequence_mean_token_mean` without its division by the row's length.
    drawn = step(seed)
    theirs, their_gradient = trl_aggregation(drawn, loss_type)
    advantages = -drawn.advantages.clone().requires_grad_()
    ours = aggregated(advantages, drawn.mask, TRL_AGGREGATIONS[loss_type], count(drawn.mask))
    same(ours.detach(), theirs)
    same(gradient(ours, advantages) * -drawn.advantages, their_gradient)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "luspo"])
def test_aggregation_of_trl_counts_samples_without_a_token(loss_type: str) -> None:
    # Where truncated answers are masked, TRL goes on dividing by their number: the fewer samples learn, the smaller is the step.
    drawn = step(0, empty=6)
    rows = len(drawn.mask)
    ours = aggregated(-drawn.advantages, drawn.mask, TRL_AGGREGATIONS[loss_type], count(drawn.mask))
    same(ours * (rows - 6) / rows, trl_aggregation(drawn, loss_type)[0])


def test_aggregation_of_trl_over_micro_batches() -> None:
    # dapo's parts add up, as it is told of the window's tokens; bnpo's token mean is that of each micro-batch.
    drawn = step(1)
    ours = aggregated(-drawn.advantages, drawn.mask, "token_mean", count(drawn.mask))
    halves = [rows_of(drawn, slice(0, 6)), rows_of(drawn, slice(6, None))]
    tokens = int(drawn.mask.sum())
    same(ours, torch.stack([trl_aggregation(half, "dapo", accumulation=2, window_tokens=tokens)[0] for half in halves]).sum())
    same(ours, trl_aggregation(drawn, "bnpo")[0])
    differ(ours, torch.stack([trl_aggregation(half, "bnpo", accumulation=2)[0] for half in halves]).sum())


def rows_of(drawn: Step, rows: slice) -> Step:
    return Step(**{name: getattr(drawn, name)[rows] for name in Step.__dataclass_fields__})


def test_aggregation_of_a_term_that_does_not_count() -> None:
    # verl's means over sequences multiply by the mask, and NaN x 0 is NaN.
    terms, mask = torch.tensor([[1.0, math.nan]]), torch.tensor([[True, False]])
    for how, theirs in VERL_AGGREGATIONS.items():
        assert aggregated(terms, mask, how, count(mask)).isfinite()
        assert verl.agg_loss(terms, mask.long(), theirs).isfinite() == (how == "token_mean")


# -- value loss


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", [0.1, 0.5, None])
@pytest.mark.parametrize("how", VERL_AGGREGATIONS)
def test_value_loss(how: str, clip: float | None, seed: int) -> None:
    # Mutation: in engine/algorithms/value.py, `minimum` for `maximum`. verl has no loss without a clip; its clip at infinity is one.
    drawn = step(seed)
    values = drawn.values.clone().requires_grad_()
    terms = value.loss(values, drawn.old_values, drawn.returns, drawn.mask, clip)
    ours = aggregated(terms.per_token, drawn.mask, how, count(drawn.mask))
    columns = (values, drawn.returns, drawn.old_values, drawn.mask.long(), math.inf if clip is None else clip)
    theirs, clipped = verl.compute_value_loss(*columns, VERL_AGGREGATIONS[how], loss_scale_factor=17)
    same(ours, theirs, tolerance=2e-8)
    same(gradient(ours, values), gradient(theirs, values), tolerance=2e-8)
    assert terms.statistics.result()["critic/clip_fraction"] == pytest.approx(clipped.item(), abs=1e-6)


def test_value_of_a_token_that_does_not_count() -> None:
    values = torch.tensor([[1.0, math.nan]], requires_grad=True)
    old, returns, mask = torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[True, False]])
    ours = aggregate(value.loss(values, old, returns, mask, 0.2).per_token, mask, count(mask), "token_mean")
    theirs, _ = verl.compute_value_loss(values, returns, old, mask.long(), 0.2)
    same(ours, theirs)
    assert gradient(ours, values).isfinite().all()
    assert gradient(theirs, values).isnan().tolist() == [[False, True]]


# -- off-policy correction


def log_ratio(drawn: Step) -> Tensor:
    return drawn.old_log_probs - drawn.rollout_log_probs


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cap", [1.1, 2.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights(level: str, cap: float, seed: int) -> None:
    # Mutation: in engine/algorithms/off_policy.py, rollout - trainer. Outside the mask verl's are 0 and ours 1, where no term is multiplied by them.
    drawn = step(seed)
    ours = off_policy.weights(drawn.old_log_probs, drawn.rollout_log_probs, drawn.mask, ImportanceWeightsConfig(level=level, cap=cap))
    theirs, _ = verl_off_policy.compute_rollout_correction_weights(log_ratio(drawn), drawn.mask.long(), level, cap)
    same(ours[drawn.mask], theirs[drawn.mask])
    assert (ours[~drawn.mask] == 1).all()
    assert (theirs[~drawn.mask] == 0).all()
    mode = f"{level}_truncate"
    correction = {"use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": mode}
    of_trl = trl_advantages(drawn, GRPOTrainer, len(drawn.mask), **correction, vllm_importance_sampling_clip_max=cap)["importance_sampling_ratio"]
    same(ours[drawn.mask], of_trl.expand_as(ours)[drawn.mask], tolerance=1e-5)  # TRL keeps the rollout's log-probs in float32


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("unit", "level", "low", "high", "theirs"),
    [
        ("token", "token", 0.7, 1.3, "token_k1"),
        ("sequence", "sequence", 0.3, 2.5, "seq_sum_k1"),
        ("sequence", "geometric", 0.96, 1.05, "seq_mean_k1"),
    ],
)
def test_rejection(unit: str, level: str, low: float, high: float, theirs: str, seed: int) -> None:
    # verl compares rollout / trainer with its bounds (its k1 is minus the log-ratio), so ours are turned round for it.
    # Mutation: in engine/algorithms/off_policy.py, `config.high` for `config.low`.
    drawn = step(seed)
    settings = RejectionConfig(unit=unit, level=level, low=low, high=high)
    ours = off_policy.kept(drawn.old_log_probs, drawn.rollout_log_probs, drawn.mask, drawn.group, settings)
    kept, _ = verl_off_policy.compute_rollout_rejection_mask(log_ratio(drawn), drawn.mask.long(), theirs, f"{1 / high}_{1 / low}")
    assert ours.tolist() == kept.bool().tolist()
    assert 0 < ours.sum() < drawn.mask.sum()


def test_bounds_of_rejection_are_those_of_the_ratio() -> None:
    # Ratios 1.5 and 0.7, bounds 0.6 to 1.4. verl keeps the first and rejects the second: it compares 1 / 1.5 and 1 / 0.7.
    ratios, mask = torch.tensor([[1.5, 0.7]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    settings = RejectionConfig(unit="token", level="token", low=0.6, high=1.4)
    assert off_policy.kept(ratios.log(), torch.zeros(1, 2), mask, torch.zeros(1), settings).tolist() == [[False, True]]
    assert verl_off_policy.compute_rollout_rejection_mask(ratios.log(), mask.long(), "token_k1", "0.6_1.4")[0].tolist() == [[1, 0]]


def test_rejection_of_a_ratio_that_is_no_number() -> None:
    # A token whose log-prob is NaN on one side has no ratio. Ours goes; so does verl's, of whose weights it makes NaN all the same.
    old, rollout, mask = torch.tensor([[math.nan, -1.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    settings = RejectionConfig(unit="token", level="token", low=0.5, high=2.0)
    assert off_policy.kept(old, rollout, mask, torch.zeros(1), settings).tolist() == [[False, True]]
    assert verl_off_policy.compute_rollout_rejection_mask(old - rollout, mask.long(), "token_k1", "0.5_2.0")[0].tolist() == [[0, 1]]

"""A step's advantages and loss terms: what an estimator or a loss of somebody's own gives is looked at, and blamed by name."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.algorithms import step
from engine.algorithms.step import policy_terms, step_advantages
from engine.algorithms.types import AdvantageInputs, Advantages, LossInputs, LossTerms
from engine.batch import Batch
from engine.config import AlgorithmConfig, CriticConfig, KLConfig, OptimizerConfig, OwnAdvantageConfig, OwnLossConfig
from engine.training.balance import balanced_order

MASK = torch.tensor([[False, True, True], [False, True, False], [False, False, False], [False, True, True]])
ESTIMATOR, LOSS = "my_estimator:mine", "my_loss:mine"


@pytest.fixture
def estimate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Batch]:
    """The advantages of a small step by an estimator of one's own."""

    def run(
        give: Callable[[AdvantageInputs], Any], critic: CriticConfig | None = None, kl: KLConfig | None = None, kl_coefficient: float | None = None
    ) -> Batch:
        monkeypatch.setattr(step.ADVANTAGES, "get", lambda name: lambda inputs, config: give(inputs))
        log_probs = {"old_log_probs": torch.full(MASK.shape, -1.0), "reference_log_probs": torch.full(MASK.shape, -3.0)}
        rewards = {"prompt": torch.tensor([0, 0, 1, 1]), "reward": torch.tensor([1.0, 0.0, 0.5, 2.0])}
        algorithm = AlgorithmConfig(advantage=OwnAdvantageConfig(estimator=ESTIMATOR), critic=critic, kl=kl)
        return step_advantages(Batch({"response_mask": MASK, **rewards, **log_probs}), algorithm, kl_coefficient=kl_coefficient)

    return run


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LossTerms]:
    """The terms of a small micro-batch by a loss of one's own."""

    def run(give: Callable[[LossInputs], Any]) -> LossTerms:
        monkeypatch.setattr(step.LOSSES, "get", lambda name: lambda inputs, config: give(inputs))
        zeros = torch.zeros(MASK.shape)
        log_probs = zeros.clone().requires_grad_()
        inputs = LossInputs(log_probs=log_probs, old_log_probs=zeros, rollout_log_probs=zeros, advantages=zeros + 1, mask=MASK)
        return policy_terms(inputs, OwnLossConfig(name=LOSS))

    return run


def masked(value: float) -> torch.Tensor:
    return torch.full(MASK.shape, value).where(MASK, 0)


def test_what_stands_outside_the_mask_goes_no_further(estimate: Callable[..., Batch]) -> None:
    # Mutation: pass the estimator's tensor on as it is: a part of the step that is cut narrower would refuse it.
    given = torch.full(MASK.shape, torch.nan).masked_fill(MASK, 3.0)
    found = estimate(lambda inputs: Advantages(given, returns=given))
    assert torch.equal(found.tensors["advantages"], masked(3.0))
    assert torch.equal(found.tensors["returns"], masked(3.0))


# Mutation of each: take the check that gives this text out of `step_advantages` or `_check`; the step then fails elsewhere, or learns from NaN.
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (masked(1.0), "gave a Tensor; it must give engine.algorithms.types.Advantages"),
        (Advantages(torch.ones(4)), r"advantages has shape \[4\]; the response mask has \[4, 3\]"),
        (Advantages(torch.ones(4, 1)), r"advantages has shape \[4, 1\]"),  # would broadcast without a word
        (Advantages(torch.ones(4, 3, dtype=torch.int64)), "advantages is torch.int64; it must be a floating-point tensor"),
        (Advantages([[1.0] * 3] * 4), "advantages is list"),
        (Advantages(masked(torch.nan)), "advantages of row 0 are not finite on response tokens; its reward is 1"),
        (Advantages(masked(1.0).index_put((torch.tensor(3), torch.tensor(2)), torch.tensor(torch.inf))), "advantages of row 3 .* its reward is 2"),
        (Advantages(masked(1.0), returns=torch.ones(3, 3)), r"returns has shape \[3, 3\]"),
        (Advantages(masked(1.0), returns=masked(torch.nan)), "returns of row 0 are not finite"),
    ],
)
def test_an_estimator_that_gives_something_else_is_named(estimate: Callable[..., Batch], given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"algorithm.advantage.estimator={ESTIMATOR}.* ?{text}"):
        estimate(lambda inputs: given)


def test_a_critic_needs_returns(estimate: Callable[..., Batch]) -> None:
    # Mutation: leave the check out, and the critic's update misses a column that nobody has heard of.
    critic = CriticConfig(optimizer=OptimizerConfig(learning_rate=1e-3))
    with pytest.raises(ValueError, match=f"{ESTIMATOR} gave no returns, and a critic is trained on them"):
        estimate(lambda inputs: Advantages(masked(1.0)), critic)
    assert "returns" in estimate(lambda inputs: Advantages(masked(1.0), returns=masked(1.0)), critic).tensors


def test_a_loss_of_ones_own_is_taken_as_it_is(lose: Callable[..., LossTerms]) -> None:
    terms = lose(lambda inputs: LossTerms(per_token=-inputs.advantages * inputs.log_probs))
    assert terms.per_token.shape == MASK.shape


# Mutation of each: take the check that gives this text out of `policy_terms` or `_check`.
@pytest.mark.parametrize(
    ("give", "text"),
    [
        (lambda inputs: -inputs.log_probs, "gave a Tensor; it must give engine.algorithms.types.LossTerms"),
        (lambda inputs: LossTerms(per_token=-inputs.log_probs.sum()), r"per_token has shape \[\]; the response mask has \[4, 3\]"),
        (lambda inputs: LossTerms(per_token=-inputs.log_probs.sum(dim=1, keepdim=True)), r"per_token has shape \[4, 1\]"),
        (lambda inputs: LossTerms(per_token=-inputs.log_probs[inputs.mask]), r"per_token has shape \[5\]"),
        (lambda inputs: LossTerms(per_token=-inputs.log_probs.detach()), "per_token has no gradient; compute it from inputs.log_probs"),
    ],
)
def test_a_loss_that_gives_something_else_is_named(lose: Callable[..., LossTerms], give: Callable[[LossInputs], Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"algorithm.loss.name={LOSS}.* ?{text}"):
        lose(give)


def rows_of(lengths: list[int], order: list[int]) -> Batch:
    """Four prompts with two samples each, response lengths as given, in this order of rows."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(8, 6, generator=generator)
    batch = Batch(
        {
            "response_mask": torch.arange(6) < torch.tensor(lengths)[:, None],
            "prompt": torch.tensor([5, 5, 3, 3, 9, 9, 1, 1]),
            "sample": torch.tensor([0, 1] * 4),
            "reward": torch.tensor([1.0, 0.0, 3.0, 0.0, 9.0, 0.0, 1.0, 0.5]),
            "old_log_probs": old,
            "rollout_log_probs": old,
        }
    )
    return batch.reorder(order)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage": {"scale": "minibatch"}},
        {"loss": {"name": "clip_cov", "fraction": 0.3, "covariance_low": -9.0, "covariance_high": 9.0}},
        {"loss": {"name": "kl_cov", "fraction": 0.3}},
    ],
    ids=str,
)
def test_a_step_does_not_know_over_how_many_ranks_it_is_divided(algorithm: dict[str, Any]) -> None:
    # Mutations: mini-batches by the place of the row in the step, whatever the parts; tokens selected by the place of their row.
    lengths, config = [6, 1, 2, 5, 3, 3, 4, 1], AlgorithmConfig(**algorithm)
    found = {}
    for parts in (1, 2, 4):
        order = balanced_order(lengths, parts, updates=2)
        made = step_advantages(rows_of(lengths, order), config, parts, 2, (3, 7))
        found[parts] = made.reorder(torch.tensor(order).argsort())
    assert balanced_order(lengths, 2, updates=2) != balanced_order(lengths, 4, updates=2)
    for name, tensor in found[1].tensors.items():
        assert torch.equal(found[2].tensors[name], tensor)
        assert torch.equal(found[4].tensors[name], tensor)


def test_mini_batches_are_the_ones_that_ranks_cut() -> None:
    # Two ranks with two mini-batches each: rows 0 1 | 2 3 on the first, 4 5 | 6 7 on the second. Centred +-.5 +-4.5 in the first mini-batch,
    # +-1.5 +-.25 in the second. Mutation: rows 0 to 3 as the first mini-batch.
    made = step_advantages(rows_of([1] * 8, list(range(8))), AlgorithmConfig(advantage={"scale": "minibatch"}), 2, 2)
    first, second = (math.sqrt(2 * (one**2 + two**2) / 3) + 1e-6 for one, two in ((0.5, 4.5), (1.5, 0.25)))
    expected = [0.5 / first, -0.5 / first, 1.5 / second, -1.5 / second, 4.5 / first, -4.5 / first, 0.25 / second, -0.25 / second]
    assert made.tensors["advantages"][:, 0].tolist() == pytest.approx(expected, abs=1e-6)


def test_the_selection_is_of_the_seed_and_of_response_tokens() -> None:
    # 25 response tokens, of which floor(.3 x 25) = 7. Mutation: draw from all positions, or from the global random state.
    config = AlgorithmConfig(loss={"name": "clip_cov", "fraction": 0.3, "covariance_low": -99.0, "covariance_high": 99.0})
    batch = rows_of([6, 1, 2, 5, 3, 3, 4, 1], list(range(8)))

    def selected(*seed: int) -> torch.Tensor:
        return step_advantages(batch, config, seed=seed).tensors["selected"]

    assert int(selected(3, 7).sum()) == 7
    assert not (selected(3, 7) & ~batch.tensors["response_mask"]).any()
    torch.manual_seed(0)
    assert torch.equal(selected(3, 7), selected(3, 7))
    assert not torch.equal(selected(3, 7), selected(3, 8))
    assert not torch.equal(selected(3, 7), selected(4, 7))
    assert "selected" not in step_advantages(batch, AlgorithmConfig()).tensors
    # What is not learnt from is not selected either.
    kept = batch.with_tensors(kept=torch.tensor([True, False] * 4))
    assert not step_advantages(kept, config).tensors["selected"][1::2].any()


def test_of_a_group_that_is_in_the_step_twice_each_copy_has_a_selection_of_its_own() -> None:
    # Mutation: order by prompt: which copy a token is selected of then depends on which comes first, and so on the number of ranks.
    batch, order = rows_of([6, 1, 2, 5, 3, 3, 4, 1], list(range(8))), torch.tensor([3, 2, 5, 1, 0, 4])
    copies = batch.rows(torch.tensor([2, 3, 2, 3, 0, 1])).with_tensors(group=torch.tensor([0, 0, 1, 1, 2, 2]))
    for number in range(1, 22):  # tokens, of 21
        config = AlgorithmConfig(loss={"name": "kl_cov", "fraction": (number + 0.5) / 21.5})
        selected = step_advantages(copies, config).tensors["selected"]
        assert int(selected.sum()) == number
        assert torch.equal(step_advantages(copies.reorder(order), config).tensors["selected"], selected[order])


def test_columns_of_the_step_reach_the_estimator() -> None:
    # Mutation: a column under another name than the workers give it.
    batch = rows_of([1] * 8, list(range(8))).with_tensors(greedy_reward=torch.full((8,), 0.5), squared_probabilities=torch.full((8, 6), 0.5))
    greedy = step_advantages(batch, AlgorithmConfig(advantage={"estimator": "remax"})).tensors["advantages"]
    assert greedy[:, 0].tolist() == [0.5, -0.5, 2.5, -0.5, 8.5, -0.5, 0.5, 0]
    assert step_advantages(batch, AlgorithmConfig(advantage={"estimator": "optimal_token_baseline"})).tensors["advantages"].any()


@pytest.mark.parametrize(("coefficient", "penalty"), [(None, 0.1), (0.3, 0.3)])
def test_the_penalty_in_the_reward_is_the_one_in_force(estimate: Callable[..., Batch], coefficient: float | None, penalty: float) -> None:
    # k1 of log-probs that are 2 above the reference's. Mutations: the configured coefficient whatever a controller says; the penalty added.
    seen: list[torch.Tensor] = []

    def give(inputs: AdvantageInputs) -> Advantages:
        assert inputs.token_rewards is not None
        seen.append(inputs.token_rewards)
        return Advantages(masked(1.0))

    estimate(give, kl=KLConfig(coefficient=0.1, estimator="k1", place="reward"), kl_coefficient=coefficient)
    torch.testing.assert_close(seen[0], masked(-2 * penalty))

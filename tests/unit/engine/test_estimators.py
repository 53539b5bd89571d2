"""Every advantage estimator: golden values with their derivation, and the rules of the numerics that hold for all of them.

The rules go over the registry: a new estimator is taken in by its line. GRPO and GAE have files of their own for what is theirs alone.
"""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from engine.algorithms.registry import ADVANTAGES
from engine.algorithms.types import AdvantageInputs
from engine.config import AdvantageConfig, AlgorithmConfig, CriticConfig, KLConfig, OptimizerConfig

ONES = torch.ones(4, 1, dtype=torch.bool)


def config_of(estimator: str, **parameters: Any) -> AdvantageConfig:
    return TypeAdapter(AdvantageConfig).validate_python({"estimator": estimator, **parameters})


def estimate(inputs: AdvantageInputs, estimator: str, **parameters: Any) -> Tensor:
    return ADVANTAGES.get(estimator)(inputs, config_of(estimator, **parameters)).advantages


def outcomes(estimator: str, rewards: list[float], lengths: list[int] | None = None, group: list[int] | None = None, **columns: Any) -> list[Any]:
    """The advantage of each sample on its first token, by an estimator that gives all tokens of a sample the same."""
    mask = torch.arange(max(lengths or [1])) < torch.tensor(lengths or [1] * len(rewards))[:, None]
    numbers = torch.tensor(group or [0] * len(rewards))
    inputs = AdvantageInputs(rewards=torch.tensor(rewards, dtype=torch.float64), group=numbers, mask=mask, **columns)
    values = estimate(inputs, estimator)
    assert torch.equal(values, torch.where(mask, values[:, :1], 0))
    return values[:, 0].tolist()


# Golden values.


def test_rloo() -> None:
    # 1 - (0 + 0 + 1) / 3 = 2/3. Mutation: n in place of n - 1 gives 3/4 x ... = .5 (GRPO without scale).
    assert outcomes("rloo", [1, 0, 0, 1]) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    # Group of 3: .9 - (.3 + 0) / 2 = .75; .3 - .9 / 2 = -.15; 0 - 1.2 / 2 = -.6.
    assert outcomes("rloo", [0.9, 0.3, 0]) == pytest.approx([0.75, -0.15, -0.6])


def test_grpo_pass_k() -> None:
    # Mean .25, squares 1.0 - 4 x .0625 = .6875 with rewards 1 .5 0 -.5: squares of .75 .25 -.25 -.75: 1.25, over 3: sigma .6454972.
    # Best 1, second .5: .5 / (.6454972 + 1e-6) = .7745955. Mutations: subtract the mean (1.1618932); ddof 0 (.8944256).
    assert outcomes("grpo_pass_k", [0, 1, 0.5, -0.5]) == pytest.approx([0, 0.5 / (math.sqrt(1.25 / 3) + 1e-6), 0, 0], abs=1e-12)
    assert outcomes("grpo_pass_k", [0, 1, 0.5, -0.5])[1] == pytest.approx(0.7745955, abs=1e-7)
    # Two best: neither made a difference. Mutation: the largest of the others, whatever their number of best ones (1 / sigma for both).
    assert outcomes("grpo_pass_k", [1, 1, 0, 0]) == [0, 0, 0, 0]


def test_reinforce_plus_plus() -> None:
    # gamma .5. Row 1: outcome 1 after 2 tokens, G = .5 1. Row 2: outcome -1 after 1 token. Mean (.5 + 1 - 1) / 3 = 1/6;
    # centred 1/3, 5/6, -7/6: squares (4 + 25 + 49) / 36 = 13/6, over 2: 13/12. Divided by sqrt(13/12): .3202563, .8006408, -1.1208971.
    mask = torch.tensor([[True, True], [True, False]])
    inputs = AdvantageInputs(rewards=torch.tensor([1.0, -1.0]), group=torch.tensor([0, 1]), mask=mask)
    found = estimate(inputs, "reinforce_plus_plus", gamma=0.5)
    torch.testing.assert_close(found, torch.tensor([[0.3202563, 0.8006408], [-1.1208971, 0]]), rtol=0, atol=1e-6)
    # A penalty of .25 on the first token moves G there to .25 (not to .5 x .75: it is not discounted at its own token).
    with_penalty = estimate(replace(inputs, token_rewards=torch.tensor([[-0.25, 0], [0, 0]])), "reinforce_plus_plus", gamma=0.5)
    # Mean 1/12; centred 2/12, 11/12, -13/12: squares 294 / 144, over 2.
    scale = math.sqrt(294 / 288 + 1e-8)
    torch.testing.assert_close(with_penalty, torch.tensor([[2 / 12, 11 / 12], [-13 / 12, 0]]) / scale, rtol=0, atol=1e-6)


def test_reinforce_plus_plus_baseline() -> None:
    # Lengths 2 1 1 1; group 0: 1 0, centred +-.5; group 1: constant. Tokens .5 .5 -.5 0 0: mean .1; centred .4 .4 -.6 -.1 -.1, squares .7,
    # over 4: .175. Mutation: whitening over samples (.5 -.5 0 0: mean 0).
    scale = math.sqrt(0.175 + 1e-8)
    found = outcomes("reinforce_plus_plus_baseline", [1, 0, 1, 1], [2, 1, 1, 1], [0, 0, 1, 1])
    # Mutation: leave the constant group its -.1 / scale.
    assert found == pytest.approx([0.4 / scale, -0.6 / scale, 0, 0])


def test_opo() -> None:
    # Lengths 1 3 2, rewards 1 0 .5: b = (1 + 0 + 1) / 6 = 1/3. Mutation: the plain mean .5.
    assert outcomes("opo", [1, 0, 0.5], [1, 3, 2]) == pytest.approx([2 / 3, -1 / 3, 1 / 6])


def test_gpg() -> None:
    # Two groups: 1 0 and 0 0: four samples, one with a reward: alpha 4; centred +-.5. Mutation: alpha over all groups' samples with signal, 2.
    assert outcomes("gpg", [1, 0, 0, 0], group=[0, 0, 1, 1]) == pytest.approx([2, -2, 0, 0])
    # No reward at all: alpha 4 / max(1, 0), of zeros.
    assert outcomes("gpg", [0, 0, 0, 0]) == [0, 0, 0, 0]


def test_remax() -> None:
    # Rewards to go 1 1 and .25 .25, greedy .75 for both; -.5 on the first token of the second row lowers what is still to come there only.
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.25]),
        group=torch.tensor([0, 0]),
        mask=torch.ones(2, 2, dtype=torch.bool),
        token_rewards=torch.tensor([[0, 0], [-0.5, 0]]),
        greedy_rewards=torch.tensor([0.75, 0.75]),
    )
    assert estimate(inputs, "remax").tolist() == [[0.25, 0.25], [-1.0, -0.5]]


def test_optimal_token_baseline() -> None:
    # pi = .5 .25 | .5, squared .5 .5 | .75. w = 1 - 2 pi + s: .5, 1 | .75. W = .5 1.5 | .75. G = 1 1 | 0.
    # B_1 = .5 / 1.25 = .4; B_2 = 1.5 / 1.5 = 1 (the second sample has ended). A = .6, 0 | -.4.
    # Mutations: w without the sum (W_2 = 1.5 stays); B over all columns, ended samples included, or w in place of its sums: B_1 alike, so that
    # a third token tells: see the next case.
    log_probs = torch.tensor([[0.5, 0.25], [0.5, 1.0]], dtype=torch.float64).log()
    squares = torch.tensor([[0.5, 0.5], [0.75, 9.0]], dtype=torch.float64)
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0], dtype=torch.float64),
        group=torch.tensor([0, 0]),
        mask=torch.tensor([[True, True], [True, False]]),
        old_log_probs=log_probs,
        squared_probabilities=squares,
    )
    torch.testing.assert_close(
        estimate(inputs, "optimal_token_baseline"), torch.tensor([[0.6, 0], [-0.4, 0]], dtype=torch.float64), rtol=0, atol=1e-7
    )
    # Both go on: W_2 = 1.5 and .75 + (1 - 2 + 9) = 8.75; B_2 = 1.5 / 10.25. Mutation: w for W: 1 / 9.
    both = replace(inputs, mask=torch.ones(2, 2, dtype=torch.bool))
    expected = torch.tensor([[0.6, 1 - 1.5 / 10.25], [-0.4, -1.5 / 10.25]], dtype=torch.float64)
    torch.testing.assert_close(estimate(both, "optimal_token_baseline"), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("estimator", "lacking"),
    [
        ("gae", "values"),
        ("remax", "greedy_rewards"),
        ("optimal_token_baseline", "old_log_probs"),
        ("optimal_token_baseline", "squared_probabilities"),
    ],
)
def test_what_an_estimator_reads_and_the_step_does_not_have_is_named(estimator: str, lacking: str) -> None:
    with pytest.raises(ValueError, match=f"the step has no {lacking}; algorithm.advantage.estimator={estimator}"):
        estimate(replace(step(0), **{lacking: None}), estimator)


# Rules. Every estimator with every set of parameters that changes what it computes.

EVERY = [
    *((name, {}) for name in ADVANTAGES.names()),
    *(("grpo", {"scale": scale}) for scale in ("batch", "minibatch", "none")),
    ("gae", {"whiten": False, "gamma": 0.9}),
    ("reinforce_plus_plus", {"gamma": 0.9}),
]
GROUP_RELATIVE = [(name, parameters) for name, parameters in EVERY if config_of(name).group_relative]
every = pytest.mark.parametrize(("estimator", "parameters"), EVERY, ids=str)
BY_TOKEN = ("mask", "token_rewards", "values", "old_log_probs", "squared_probabilities")


def step(seed: int, rewards_by_token: bool = False, tokens: int = 6) -> AdvantageInputs:
    """Three groups of 3, 2 and 4 samples in float64, of uneven lengths and with gaps; the second is constant. Two mini-batches."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    mask = uniform(9, tokens) < 0.7
    mask[:, 1] = True
    rewards = uniform(9)
    rewards[3:5] = 0.1
    probabilities = uniform(9, tokens)
    return AdvantageInputs(
        rewards=rewards,
        group=torch.tensor([7, 7, 7, 2, 2, 5, 5, 5, 5]),
        mask=mask,
        token_rewards=uniform(9, tokens) if rewards_by_token else None,
        values=uniform(9, tokens),
        greedy_rewards=uniform(3)[torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])],
        old_log_probs=probabilities.log(),
        squared_probabilities=probabilities.square() * (1 + uniform(9, tokens)),
        mini_batch=torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1]),
    )


def kinds(estimator: str) -> list[bool]:
    """Whether tokens have rewards of their own: both ways where the estimator knows of them."""
    return [False, True] if config_of(estimator).reads_token_rewards else [False]


def changed(inputs: AdvantageInputs, change: Callable[[str, Tensor], Tensor]) -> AdvantageInputs:
    """Every tensor of the inputs as `change(name, tensor)` makes it."""
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return AdvantageInputs(**{name: change(name, tensor) if isinstance(tensor, Tensor) else tensor for name, tensor in given.items()})


@every
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), at=st.integers(0, 9), poison=st.sampled_from([0.0, 1e9, math.nan, math.inf, -math.inf]))
def test_a_row_without_response_tokens_earns_nothing_and_disturbs_no_one(estimator: str, parameters: dict, seed: int, at: int, poison: float) -> None:
    # Rule 4. Mutations: statistics over all samples in place of the valid ones, in `Groups.of`, `deviations`, gpg's alpha or opo's lengths.
    for by_token in kinds(estimator):
        inputs = step(seed, by_token)

        def insert(name: str, tensor: Tensor) -> Tensor:
            row = torch.full_like(tensor[:1], {"mask": False, "group": 7, "mini_batch": 1}.get(name, poison))
            return torch.cat([tensor[:at], row, tensor[at:]])

        alone, beside = (estimate(case, estimator, **parameters) for case in (inputs, changed(inputs, insert)))
        torch.testing.assert_close(torch.cat([beside[:at], beside[at + 1 :]]), alone, rtol=1e-12, atol=1e-12)
        assert beside[at].eq(0).all()


@every
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), gaps=st.lists(st.integers(0, 2), min_size=7, max_size=7), poison=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_observation_tokens_are_transparent(estimator: str, parameters: dict, seed: int, gaps: list[int], poison: float) -> None:
    # Rules 2 and 5. Mutations: work on columns in place of `compact` in gae, reinforce_plus_plus or optimal_token_baseline.
    places = [t + sum(gaps[: t + 1]) for t in range(6)]
    for by_token in kinds(estimator):
        inputs = step(seed, by_token)

        def widen(name: str, tensor: Tensor) -> Tensor:
            if name not in BY_TOKEN:
                return tensor
            wide = torch.full((9, 6 + sum(gaps)), False if name == "mask" else poison, dtype=tensor.dtype)
            wide[:, places] = tensor
            return wide

        plain, spread = (estimate(case, estimator, **parameters) for case in (inputs, changed(inputs, widen)))
        torch.testing.assert_close(spread[:, places], plain, rtol=1e-12, atol=1e-12)
        assert spread[~changed(inputs, widen).mask].eq(0).all()


@every
@given(seed=st.integers(0, 99), poison=st.sampled_from([math.nan, math.inf, -math.inf]))
@settings(max_examples=5, deadline=None)
def test_what_stands_outside_the_mask_changes_nothing(estimator: str, parameters: dict, seed: int, poison: float) -> None:
    # Rule 2. Mutation: `tensor * mask` for `where` anywhere.
    for by_token in kinds(estimator):
        inputs = step(seed, by_token)
        spoilt = changed(inputs, lambda name, tensor: tensor.where(inputs.mask, poison) if name in BY_TOKEN[1:] else tensor)  # noqa: B023
        assert torch.equal(estimate(spoilt, estimator, **parameters), estimate(inputs, estimator, **parameters))


@every
def test_order_of_samples_does_not_matter(estimator: str, parameters: dict) -> None:
    order = torch.tensor([4, 8, 0, 6, 2, 1, 7, 3, 5])
    for by_token in kinds(estimator):
        inputs = step(1, by_token)
        moved = changed(inputs, lambda name, tensor: tensor[order])
        torch.testing.assert_close(estimate(moved, estimator, **parameters), estimate(inputs, estimator, **parameters)[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("estimator", "parameters"), GROUP_RELATIVE, ids=str)
def test_a_group_without_signal_has_exactly_zero(estimator: str, parameters: dict) -> None:
    # Rule 3: rewards of 0.1, whose mean of three is not 0.1; and a group of one. Mutation: leave `informative` out of `Groups.of`, of
    # reinforce_plus_plus_baseline, or of optimal_token_baseline, where 1e-8 in the denominator leaves something over.
    inputs = step(2)
    found = estimate(replace(inputs, rewards=torch.where(inputs.group == 5, inputs.rewards, 0.1)), estimator, **parameters)
    assert found[:5].eq(0).all()
    assert found[5:][inputs.mask[5:]].ne(0).any()
    for by_token in kinds(estimator):
        alone = changed(step(3, by_token), lambda name, tensor: tensor[2:6])  # one sample of 7, the two of 2, one of 5
        assert estimate(alone, estimator, **parameters)[[0, 3]].eq(0).all()


@pytest.mark.parametrize(("estimator", "parameters"), GROUP_RELATIVE, ids=str)
def test_a_shifted_reward_changes_nothing(estimator: str, parameters: dict) -> None:
    # What relative means; gpg counts rewards that are not 0, and all are here. Mutation: scale the baseline of any of them.
    inputs = step(4)
    shifted = estimate(replace(inputs, rewards=inputs.rewards + 3), estimator, **parameters)
    torch.testing.assert_close(shifted, estimate(inputs, estimator, **parameters), rtol=1e-7, atol=1e-7)


@every
def test_float32_in_gives_float32_out(estimator: str, parameters: dict) -> None:
    narrow = changed(step(5), lambda name, tensor: tensor.float() if tensor.is_floating_point() else tensor)
    found = estimate(narrow, estimator, **parameters)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, estimate(step(5), estimator, **parameters).float(), rtol=1e-4, atol=1e-5)


@every
def test_nothing_to_estimate(estimator: str, parameters: dict) -> None:
    nothing = changed(step(6), lambda name, tensor: tensor[:0])
    assert estimate(nothing, estimator, **parameters).shape == (0, 6)
    empty = replace(step(6), mask=torch.zeros(9, 6, dtype=torch.bool))
    assert estimate(empty, estimator, **parameters).eq(0).all()


# What the rest of the algorithm is told of an estimator.


@pytest.mark.parametrize("estimator", ADVANTAGES.names())
def test_an_algorithm_asks_for_what_its_estimator_reads_and_refuses_what_it_does_not(estimator: str) -> None:
    # Mutation: a name in place of a fact in `AlgorithmConfig._parts_fit`, which a new estimator then escapes.
    critic = CriticConfig(optimizer=OptimizerConfig(learning_rate=1e-3))
    advantage = config_of(estimator)
    needed = {"critic": critic} if advantage.needs_critic else {}
    AlgorithmConfig(advantage=advantage, **needed)
    if advantage.needs_critic:
        with pytest.raises(ValueError, match=f"estimator={estimator} reads a critic's values"):
            AlgorithmConfig(advantage=advantage)
    elif not advantage.reads_values:
        with pytest.raises(ValueError, match=f"estimator={estimator} reads no values"):
            AlgorithmConfig(advantage=advantage, critic=critic)
    penalty = KLConfig(coefficient=0.1, place="reward")
    if advantage.reads_token_rewards:
        AlgorithmConfig(advantage=advantage, kl=penalty, **needed)
    else:
        with pytest.raises(ValueError, match=f"estimator={estimator} knows one a sample; set kl.place=loss"):
            AlgorithmConfig(advantage=advantage, kl=penalty, **needed)
        with pytest.raises(ValueError, match=f"estimator={estimator} knows one reward a sample"):
            estimate(step(0, rewards_by_token=True), estimator)


@pytest.mark.parametrize("estimator", ADVANTAGES.names())
def test_an_estimator_reads_what_it_says(estimator: str) -> None:
    # Mutation: a fact left out of the class: the step would not compute the column.
    facts = {
        "values": config_of(estimator).needs_critic,
        "greedy_rewards": config_of(estimator).needs_greedy,
        "squared_probabilities": config_of(estimator).needs_squared_probabilities,
    }
    for column, needed in facts.items():
        without = replace(step(0), **{column: None})
        if needed:
            with pytest.raises(ValueError, match=f"the step has no {column}"):
                estimate(without, estimator)
        else:
            assert torch.equal(estimate(without, estimator), estimate(step(0), estimator))

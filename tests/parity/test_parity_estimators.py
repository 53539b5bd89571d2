"""Advantage estimators beside verl's and TRL's: docs/parity.md says what the differences are."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from drawn import SEEDS, TOKENS, Step, differ, same, step
from theirs import GRPOTrainer, RLOOTrainer, trl_advantages, verl
from torch import Tensor
from verl.trainer.config import AlgoConfig

from engine.algorithms.registry import ADVANTAGES
from engine.algorithms.types import AdvantageInputs, Advantages
from engine.config import (
    GAEAdvantageConfig,
    GPGAdvantageConfig,
    GRPOAdvantageConfig,
    GRPOPassKAdvantageConfig,
    OPOAdvantageConfig,
    OptimalTokenBaselineAdvantageConfig,
    ReinforcePlusPlusAdvantageConfig,
    ReinforcePlusPlusBaselineAdvantageConfig,
    ReMaxAdvantageConfig,
    RLOOAdvantageConfig,
)

GAMMA, LAM = 0.97, 0.9
WHITENED = 2e-7
"""verl's and TRL's n / (n - 1) is in float32, and verl adds 1e-8 to n."""


def ours(drawn: Step, config: Any, token_rewards: Tensor | None = None) -> Advantages:
    inputs = AdvantageInputs(
        rewards=drawn.rewards,
        group=drawn.group,
        mask=drawn.mask,
        token_rewards=token_rewards,
        values=drawn.old_values,
        greedy_rewards=drawn.greedy_rewards,
        old_log_probs=drawn.old_log_probs,
        squared_probabilities=drawn.squared_probabilities,
    )
    return ADVANTAGES.get(config.estimator)(inputs, config)


def by_verl(name: str, **more: Any) -> Callable[[Step, Tensor], tuple[Tensor, Tensor]]:
    """The estimator that verl has registered, as a function of a step and its token rewards [B, T], giving advantages and returns."""

    def call(drawn: Step, token_rewards: Tensor) -> tuple[Tensor, Tensor]:
        given = {"token_level_rewards": token_rewards.clone(), "response_mask": drawn.mask.long(), **more}
        if name == "gae":
            return verl.compute_gae_advantage_return(**given, values=drawn.old_values, gamma=GAMMA, lam=LAM)
        if name == "remax":
            given["reward_baselines"] = drawn.greedy_rewards
        if "optimal_token_baseline" in name:
            given |= {"old_log_probs": drawn.old_log_probs, "sum_pi_squared": drawn.squared_probabilities}
        if name not in ("remax", "reinforce_plus_plus"):
            given["index"] = drawn.uids
        if name in ("grpo_passk", "reinforce_plus_plus"):
            given["config"] = AlgoConfig(gamma=GAMMA)
        return verl.get_adv_estimator_fn(name)(**given)

    return call


@dataclass(frozen=True)
class Case:
    """One estimator of ours beside one of verl's."""

    config: Any
    theirs: Callable[[Step, Tensor], tuple[Tensor, Tensor]]
    by_token: bool = False
    """Tokens may have rewards of their own."""
    tolerance: float = 1e-11
    alone: str = "reward"
    """What verl gives a sample without others: its own `reward`, 0 (`nothing`), or an `error`; `moments` where it enters those of the whole step."""
    observations: bool = True
    """Spans without a response token change nothing in verl's."""


CASES = {
    "gae": Case(GAEAdvantageConfig(estimator="gae", gamma=GAMMA, lam=LAM), by_verl("gae"), by_token=True, tolerance=WHITENED, alone="not grouped"),
    "grpo": Case(GRPOAdvantageConfig(), by_verl("grpo")),
    "grpo, verl's second": Case(GRPOAdvantageConfig(), by_verl("grpo_vectorized"), tolerance=1e-5),  # in float32 whatever it is given
    "grpo without scale": Case(GRPOAdvantageConfig(scale="none"), by_verl("grpo", norm_adv_by_std_in_grpo=False)),
    "rloo": Case(RLOOAdvantageConfig(estimator="rloo"), by_verl("rloo")),
    "rloo, verl's second": Case(RLOOAdvantageConfig(estimator="rloo"), by_verl("rloo_vectorized"), alone="nothing"),
    "grpo_pass_k": Case(GRPOPassKAdvantageConfig(estimator="grpo_pass_k"), by_verl("grpo_passk"), alone="error"),
    "reinforce_plus_plus": Case(
        ReinforcePlusPlusAdvantageConfig(estimator="reinforce_plus_plus", gamma=GAMMA),
        by_verl("reinforce_plus_plus"),
        by_token=True,
        tolerance=WHITENED,
        alone="not grouped",
    ),
    "reinforce_plus_plus_baseline": Case(
        ReinforcePlusPlusBaselineAdvantageConfig(estimator="reinforce_plus_plus_baseline"),
        by_verl("reinforce_plus_plus_baseline"),
        tolerance=WHITENED,
        alone="moments",
    ),
    "opo": Case(OPOAdvantageConfig(estimator="opo"), by_verl("opo")),
    "remax": Case(ReMaxAdvantageConfig(estimator="remax"), by_verl("remax"), by_token=True, alone="not grouped"),
    "gpg": Case(GPGAdvantageConfig(estimator="gpg"), by_verl("gpg"), alone="reward x alpha"),
    "optimal_token_baseline": Case(
        OptimalTokenBaselineAdvantageConfig(estimator="optimal_token_baseline"),
        by_verl("tir_optimal_token_baseline", handle_zero_tail=False),
        by_token=True,
        tolerance=1e-7,
    ),
    "optimal_token_baseline, verl's first": Case(
        OptimalTokenBaselineAdvantageConfig(estimator="optimal_token_baseline"),
        by_verl("optimal_token_baseline", handle_zero_tail=False),
        by_token=True,
        tolerance=1e-7,
        observations=False,
    ),
}
CONSTANT_GROUPS_DIFFER = ("grpo, verl's second", "reinforce_plus_plus_baseline")
GROUPED = [name for name, case in CASES.items() if case.alone != "not grouped"]


def constant(drawn: Step) -> Tensor:
    """[B]: samples of groups whose rewards are all equal."""
    together = drawn.group[:, None] == drawn.group
    return (~together | (drawn.rewards[:, None] == drawn.rewards)).all(dim=1)


def test_every_estimator_is_compared() -> None:
    assert {case.config.estimator for case in CASES.values()} == set(ADVANTAGES.names())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_estimator(name: str, seed: int) -> None:
    # Mutations, each red here alone or with the golden values: ddof = 0 in grpo; the largest for the second largest in grpo_pass_k; len(R) of all
    # columns in opo; gamma left out of reinforce_plus_plus; the greedy reward added in remax; samples without a reward counted in gpg's alpha.
    case = CASES[name]
    drawn = step(seed, observations=case.observations)
    token_rewards = 0.1 * (drawn.old_log_probs - drawn.reference_log_probs) if case.by_token else None
    theirs, their_returns = case.theirs(drawn, drawn.rewards_on_last_token + (0 if token_rewards is None else token_rewards))
    found = ours(drawn, case.config, token_rewards)
    compared = drawn.mask & ~constant(drawn)[:, None] if name in CONSTANT_GROUPS_DIFFER else drawn.mask
    same(found.advantages[compared], theirs[compared], case.tolerance)
    assert found.advantages[compared].abs().max() > 0.1
    if found.returns is not None:
        same(found.returns[drawn.mask], their_returns[drawn.mask], case.tolerance)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_of_trl(seed: int, scale: str) -> None:
    # TRL divides by sigma + 1e-4: with rewards of 0 and 1, half a thousandth less. Mutation: ddof = 0 in engine/algorithms/groups.py.
    drawn = step(seed, sizes=(4, 4, 4, 4), contiguous=True)
    theirs = trl_advantages(drawn, GRPOTrainer, 4, scale_rewards=scale)["advantages"]
    sigma = {"group": drawn.rewards.view(4, 4).std(dim=1).repeat_interleave(4), "batch": drawn.rewards.std(), "none": torch.tensor(0.0)}[scale]
    expected = theirs * (1 if scale == "none" else (sigma + 1e-4) / (sigma + 1e-6))
    same(ours(drawn, GRPOAdvantageConfig(scale=scale)).advantages, torch.where(drawn.mask, expected[:, None], 0), tolerance=WHITENED)


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_of_trl(seed: int) -> None:
    drawn = step(seed, sizes=(4, 4, 4, 4), contiguous=True)
    theirs = trl_advantages(drawn, RLOOTrainer, 4)["advantages"]
    found = ours(drawn, RLOOAdvantageConfig(estimator="rloo"))
    same(found.advantages, torch.where(drawn.mask, theirs[:, None], 0))


@pytest.mark.parametrize("name", GROUPED)
def test_sample_without_others(name: str) -> None:
    # The first prompt has one sample. Ours is 0: there is nothing to compare it with. verl takes the baseline 0: it learns from the whole reward.
    case, drawn = CASES[name], step(3, sizes=(1, 3, 4), observations=False)
    alone = drawn.group == drawn.group.min()
    reward = drawn.rewards[alone].item()
    assert abs(reward) > 0.1
    found = ours(drawn, case.config).advantages
    assert (found[alone] == 0).all()
    if case.alone == "error":
        with pytest.raises(ValueError, match="at least 2 samples per group"):
            case.theirs(drawn, drawn.rewards_on_last_token)
        return
    theirs = case.theirs(drawn, drawn.rewards_on_last_token)[0]
    given = theirs[alone][drawn.mask[alone]]
    if case.alone == "moments":
        differ(found[~alone], theirs[~alone])
        return
    expected = {"reward": reward, "nothing": 0.0, "reward x alpha": reward * len(drawn.rewards) / int((drawn.rewards != 0).sum())}[case.alone]
    # GRPO's divides by a standard deviation of 1 + 1e-6.
    same(given, torch.full_like(given, expected), tolerance=2e-6)
    others = drawn.mask & ~constant(drawn)[:, None]
    same(found[others], theirs[others], case.tolerance)


@pytest.mark.parametrize("name", ["grpo", "grpo, verl's second", "rloo", "rloo, verl's second", "gpg", "reinforce_plus_plus_baseline"])
def test_sample_without_a_token(name: str) -> None:
    # A rejected or masked sample: in verl its reward goes on standing in its group's mean. So verl gives what ours gives where it has a token.
    case, drawn = CASES[name], step(2, empty=4, observations=False)
    there = drawn.mask.any(dim=1)
    theirs = case.theirs(drawn, drawn.rewards_on_last_token)[0]
    found = ours(drawn, case.config).advantages
    differ(found[drawn.mask], theirs[drawn.mask])
    if name != "reinforce_plus_plus_baseline":  # whose moments are over tokens
        as_if = replace(drawn, mask=drawn.mask | (~there[:, None] & (torch.arange(drawn.mask.shape[1]) == 0)))
        compared = drawn.mask & ~constant(drawn)[:, None]
        same(ours(as_if, case.config).advantages[compared], theirs[compared], case.tolerance)


def test_constant_group() -> None:
    # The mean of four times 0.1 in float32, in which verl's second computes, is not 0.1, and what is left is divided by 1e-6. Ours is exactly 0.
    drawn = step(0)
    there = constant(drawn)[:, None] & drawn.mask
    assert (ours(drawn, GRPOAdvantageConfig()).advantages[there] == 0).all()
    assert by_verl("grpo_vectorized")(drawn, drawn.rewards_on_last_token)[0][there].abs().min() > 1e-3


def test_constant_group_of_reinforce_plus_plus_baseline() -> None:
    # Whitening subtracts the mean over tokens, so that verl teaches a group without any signal to be shorter or longer; ours is 0.
    case, drawn = CASES["reinforce_plus_plus_baseline"], step(3)
    theirs = case.theirs(drawn, drawn.rewards_on_last_token)[0]
    compared = constant(drawn)[:, None] & drawn.mask
    assert (ours(drawn, case.config).advantages[compared] == 0).all()
    assert theirs[compared].abs().min() > 1e-2


def test_tail_of_the_longest_response() -> None:
    # Beyond the second longest response a sample has no others: its baseline is its own reward to go, so ours is 0; by default verl takes none there.
    config, drawn = OptimalTokenBaselineAdvantageConfig(estimator="optimal_token_baseline"), step(0, sizes=(3,), observations=False)
    drawn = replace(drawn, rewards=torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64), mask=torch.arange(TOKENS) < torch.tensor([[9], [5], [3]]))
    found = ours(drawn, config).advantages
    theirs = by_verl("tir_optimal_token_baseline")(drawn, drawn.rewards_on_last_token)[0]
    same(found[:, :5], theirs[:, :5], tolerance=1e-7)
    same(found[0, 5:9], torch.zeros(4), tolerance=1e-7)
    same(theirs[0, 5:9], torch.ones(4))


def test_columns_of_the_optimal_token_baseline() -> None:
    # verl's first compares what stands in the same column, though one of the samples has had a tool's answer in between; its second does not.
    drawn = step(4)
    config = OptimalTokenBaselineAdvantageConfig(estimator="optimal_token_baseline")
    first = CASES["optimal_token_baseline, verl's first"].theirs(drawn, drawn.rewards_on_last_token)[0]
    differ(ours(drawn, config).advantages[drawn.mask], first[drawn.mask])

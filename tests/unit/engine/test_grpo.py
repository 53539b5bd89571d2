"""GRPO's advantage: golden values, and rules 3 and 4 of the numerics (groups without signal, samples without tokens)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.algorithms.groups import Groups, group_statistics
from engine.algorithms.grpo import advantages, grpo
from engine.algorithms.registry import ADVANTAGES
from engine.algorithms.types import AdvantageInputs
from engine.config import GRPOAdvantageConfig


def run(rewards: list[float], group: list[int], scale: str = "group", valid: list[bool] | None = None) -> Tensor:
    keep = [True] * len(rewards) if valid is None else valid
    return of(torch.tensor(rewards, dtype=torch.float32), torch.tensor(group), scale, torch.tensor(keep, dtype=torch.bool))


def of(rewards: Tensor, group: Tensor, scale: str, valid: Tensor) -> Tensor:
    return grpo(rewards, Groups.of(rewards, group, valid), scale, valid).to(rewards.dtype)


def test_golden_values() -> None:
    # mu 1/2; squares 4 x 1/4, over n - 1 = 3: sigma = sqrt(1/3) = 0.5773503; 0.5 / (0.5773503 + 1e-6) = 0.8660239.
    # Mutation: ddof 0 gives 0.999998; no epsilon gives 0.8660254, which differs in the sixth digit.
    torch.testing.assert_close(run([1, 0, 0, 1], [5] * 4), torch.tensor([1.0, -1, -1, 1]) * 0.8660239, rtol=0, atol=1e-7)
    torch.testing.assert_close(run([1, 0, 0, 1], [5] * 4, "none"), torch.tensor([0.5, -0.5, -0.5, 0.5]))


def test_scale_batch() -> None:
    # Groups [1, 0] and [1, 1, 1]: centred +-1/2 and 0. Batch mean 4/5; squares 4 x 0.04 + 0.64 = 0.8, over 4: sigma = sqrt(0.2).
    # Mutation: the standard deviation of the centred rewards instead gives sqrt(0.125).
    expected = 0.5 / (math.sqrt(0.2) + 1e-6)
    torch.testing.assert_close(run([1, 0, 1, 1, 1], [0, 0, 1, 1, 1], "batch"), torch.tensor([expected, -expected, 0, 0, 0]))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_without_signal_get_exactly_zero(scale: str) -> None:
    # The float64 mean of three times 0.1 is not 0.1, and the rest is not 0.
    # Mutation: leave out `informative` (float32 alone would not show it: its sums are exact in float64).
    rewards, group = torch.tensor([0.1, 0.1, 0.1, 0.7, 1.0, 0.0], dtype=torch.float64), torch.tensor([3, 3, 3, 9, 4, 4])
    values = of(rewards, group, scale, torch.ones(6, dtype=torch.bool))
    assert values[:4].tolist() == [0.0] * 4
    assert values[4] == -values[5] != 0


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [1.0, 1e9, math.nan, math.inf])
def test_a_sample_without_tokens_disturbs_no_one(scale: str, reward: float) -> None:
    # Mutation: count `valid` samples only in the size, not in the sum (or the other way round).
    rewards, group = [1.0, 0.0, 0.5, 1.0, 0.0], [0, 0, 0, 1, 1]
    alone = run(rewards, group, scale)
    beside = run([*rewards[:3], reward, *rewards[3:]], [0, 0, 0, 0, 1, 1], scale, [True, True, True, False, True, True])
    assert beside[3] == 0
    assert torch.equal(torch.cat([beside[:3], beside[4:]]), alone)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_left_with_one_valid_sample_or_none_gets_zero(scale: str) -> None:
    values = run([1, 0, 1, 0, 1, 0], [0, 0, 1, 1, 2, 2], scale, [True, False, False, False, True, True])
    assert values[:4].tolist() == [0.0] * 4
    assert values[4] > 0


@given(data=st.data(), scale=st.sampled_from(["group", "none"]))
def test_equals_a_loop_over_groups(data: st.DataObject, scale: str) -> None:
    group = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=16))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=len(group), max_size=len(group)))
    values = run(rewards, group, scale).tolist()
    for number in set(group):
        rows = [row for row, other in enumerate(group) if other == number]
        own = torch.tensor([rewards[row] for row in rows], dtype=torch.float64)
        if len(set(own.tolist())) == 1:
            assert [values[row] for row in rows] == [0.0] * len(rows)
            continue
        expected = (own - own.mean()) / (own.std() + 1e-6 if scale == "group" else 1)
        assert [values[row] for row in rows] == pytest.approx(expected.tolist(), abs=1e-6)


@given(order=st.permutations(range(8)))
def test_order_of_samples_does_not_matter(order: list[int]) -> None:
    rewards = torch.tensor([0.1, 0.9, 0.3, 0.3, 1.0, 0.0, 0.7, 0.2])
    group = torch.tensor([0, 0, 1, 1, 0, 2, 2, 2])
    valid = torch.tensor([True] * 7 + [False])
    values = of(rewards, group, "group", valid)
    assert torch.equal(of(rewards[order], group[order], "group", valid[order]), values[order])


def test_advantages_are_spread_over_response_tokens_only() -> None:
    mask = torch.tensor([[False, True, True], [False, True, False], [False, False, False]])
    inputs = AdvantageInputs(rewards=torch.tensor([1.0, 0.0, math.nan]), group=torch.zeros(3, dtype=torch.int64), mask=mask)
    spread = ADVANTAGES.get("grpo")(inputs, GRPOAdvantageConfig(scale="none")).advantages
    assert spread.tolist() == [[0, 0.5, 0.5], [0, -0.5, 0], [0, 0, 0]]
    assert ADVANTAGES.get("grpo") is advantages


def test_observation_tokens_are_transparent() -> None:
    # Rule 5: a span without response tokens, anywhere, leaves the values on the others alone.
    rewards, group = torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.int64)
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    wide = torch.zeros(3, 5, dtype=torch.bool)
    wide[:, [1, 4]] = mask
    plain = advantages(AdvantageInputs(rewards=rewards, group=group, mask=mask), GRPOAdvantageConfig()).advantages
    spread = advantages(AdvantageInputs(rewards=rewards, group=group, mask=wide), GRPOAdvantageConfig()).advantages
    assert torch.equal(spread[:, [1, 4]], plain)


def test_rewards_by_token_are_refused() -> None:
    # Mutation: leave the check out; a KL penalty in the reward then has no effect, and nothing says so.
    inputs = AdvantageInputs(rewards=torch.zeros(2), group=torch.zeros(2), mask=torch.ones(2, 3).bool(), token_rewards=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"set algorithm\.kl\.place=loss"):
        advantages(inputs, GRPOAdvantageConfig())


def test_scale_minibatch() -> None:
    # Two groups a mini-batch. Centred: +-1/2 +-1/2 in the first, +-1 +-1/2 in the second; sigma = sqrt(4 x .25 / 3) and sqrt(2.5 / 3).
    # Mutation: the deviation of the rewards, whose groups differ in mean by 10; or that of all eight.
    rewards, group = torch.tensor([1.0, 0, 11, 10, 2, 0, 1, 0]), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    inputs = AdvantageInputs(rewards=rewards, group=group, mask=torch.ones(8, 1).bool(), mini_batch=torch.tensor([0] * 4 + [1] * 4))
    found = advantages(inputs, GRPOAdvantageConfig(scale="minibatch")).advantages[:, 0]
    one, two = 1 / (math.sqrt(1 / 3) + 1e-6), 1 / (math.sqrt(2.5 / 3) + 1e-6)
    torch.testing.assert_close(found, torch.tensor([0.5, -0.5, 0.5, -0.5, 0, 0, 0, 0]) * one + torch.tensor([0, 0, 0, 0, 1, -1, 0.5, -0.5]) * two)
    with pytest.raises(ValueError, match="the step has no mini_batch"):
        advantages(AdvantageInputs(rewards=rewards, group=group, mask=inputs.mask), GRPOAdvantageConfig(scale="minibatch"))


def test_groups_without_signal_are_counted() -> None:
    # Groups: 0 informative; 1 constant; 2 of one; 3 has no valid sample; 4 has one left; 5 is constant but for one
    # that is not valid. Mutation: take the largest or the smallest reward over all samples.
    rewards = torch.tensor([1.0, 0, 1, 1, 0.5, 0, 1, 1, 0, -1, -1, 0])
    group = torch.tensor([0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5, 5])
    valid = torch.tensor([True, True, True, True, True, False, False, True, False, True, True, False])
    assert group_statistics(rewards, group, valid).result() == {"data/zero_signal_groups": 5.0, "data/single_sample_groups": 3.0}

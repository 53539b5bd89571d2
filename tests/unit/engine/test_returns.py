"""Sums of what is still to come, over response tokens moved together: against the recursion written out, and against lost precision."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithms.returns import BLOCK, Together, rewards_by_token, rewards_to_go, sums_to_come
from engine.algorithms.types import AdvantageInputs


@given(seed=st.integers(0, 999), length=st.integers(0, 3 * BLOCK + 1), factor=st.sampled_from([0.0, 1e-200, 0.3, 0.95, 1.0]))
def test_equals_the_recursion(seed: int, length: int, factor: float) -> None:
    # Mutations: the powers transposed; a block takes over the sum of the next one undiscounted, or from the first to the last.
    values = torch.randn(3, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected, later = torch.zeros_like(values), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(length)):
        later = values[:, t] + factor * later
        expected[:, t] = later
    torch.testing.assert_close(sums_to_come(values, factor), expected, rtol=1e-13, atol=1e-13)


def test_long_rows_with_a_small_factor_lose_nothing() -> None:
    # 1 at the end of 4096 tokens: 0.9^4095 is 4e-188. Mutation: reverse cumulative sums of x / factor^t, which overflow or drown the small ones.
    values = torch.zeros(1, 4096, dtype=torch.float64)
    values[0, -1] = 1
    found = sums_to_come(values, 0.9)[0]
    torch.testing.assert_close(found.log(), torch.arange(4095, -1, -1).double() * torch.tensor(0.9, dtype=torch.float64).log(), rtol=1e-12, atol=0)


def test_response_tokens_are_moved_together_and_back() -> None:
    mask = torch.tensor([[False, True, False, True], [False, False, False, False], [True, True, True, False]])
    values = torch.arange(12.0).view(3, 4)
    together = Together.of(mask)
    assert together.compact(values).tolist() == [[1, 3, 0], [0, 0, 0], [8, 9, 10]]
    assert torch.equal(together.spread(together.compact(values)), torch.where(mask, values, 0))
    # Mutation: multiply by the mask in place of the column that is cut off: NaN.
    assert torch.equal(together.compact(torch.where(mask, values, torch.nan)), together.compact(values))


@pytest.mark.parametrize("rows", [0, 2])
def test_without_response_tokens_there_is_nothing(rows: int) -> None:
    mask = torch.zeros(rows, 3, dtype=torch.bool)
    together = Together.of(mask)
    assert together.compact(torch.ones(rows, 3)).shape == (rows, 0)
    assert together.spread(sums_to_come(together.compact(torch.ones(rows, 3)), 1.0)).tolist() == [[0.0] * 3] * rows


def test_the_outcome_stands_on_the_last_token_beside_rewards_by_token() -> None:
    # Mutation: add the rewards by token outside of the mask too: NaN.
    mask = torch.tensor([[True, False, True], [False, False, False]])
    given_ = torch.tensor([[0.5, torch.nan, 0.25], [torch.nan] * 3])
    inputs = AdvantageInputs(rewards=torch.tensor([2.0, torch.nan]), group=torch.zeros(2), mask=mask, token_rewards=given_)
    assert rewards_by_token(inputs).tolist() == [[0.5, 0, 2.25], [0, 0, 0]]
    # Mutation: the outcome on the last token alone, or the token's own reward left out of the sum.
    assert torch.where(mask, rewards_to_go(inputs), 0).tolist() == [[2.75, 0, 2.25], [0, 0, 0]]
    plain = AdvantageInputs(rewards=torch.tensor([2.0, torch.nan]), group=torch.zeros(2), mask=mask)
    assert torch.where(mask, rewards_to_go(plain), 0).tolist() == [[2, 0, 2], [0, 0, 0]]

from typing import Any
from unittest import mock

import pytest
import torch

from engine.config import SamplingConfig
from engine.rollout.backend import Request
from engine.rollout.transformers import _Row, draw, restrict

PROBABILITIES = [0.06, 0.5, 0.15, 0.04, 0.25]
LOGITS = torch.tensor([PROBABILITIES]).log() + 3.0


def rows(count: int, sampling: SamplingConfig | None) -> list[_Row]:
    return [_Row(i, Request([1], i, sampling, 4), {9}, 16, None) for i in range(count)]


# Mutations: any two rules in another order; top_p counting a token's own share; min_p as an absolute probability; a rule left out.
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, [0.0036, 0.25, 0.0225, 0.0016, 0.0625]),  # squares
        ({"min_p": 0.2}, [0, 0.5, 0.15, 0, 0.25]),  # at least 0.2 x 0.5
        ({"top_k": 2}, [0, 0.5, 0, 0, 0.25]),
        ({"top_p": 0.7}, [0, 0.5, 0, 0, 0.25]),
        ({"top_p": 0.8}, [0, 0.5, 0.15, 0, 0.25]),
        ({"top_p": 0.1}, [0, 0.5, 0, 0, 0]),  # the likeliest always stays
        # Of the three likeliest, the first two have 0.75 / 0.9 = 0.83; of all tokens 0.75, and a third would stay.
        ({"top_k": 3, "top_p": 0.8}, [0, 0.5, 0, 0, 0.25]),
        ({"min_p": 0.2, "top_p": 0.8}, [0, 0.5, 0, 0, 0.25]),
        # Squared, the third has 0.09 of the likeliest; as it was, 0.3.
        ({"temperature": 0.5, "min_p": 0.2}, [0, 0.25, 0, 0, 0.0625]),
        ({"top_k": 100}, PROBABILITIES),
    ],
    ids=str,
)
def test_rules_leave_what_they_should(settings: dict[str, Any], expected: list[float]) -> None:
    # Beside rows with other rules, which must not matter.
    both = restrict(LOGITS.repeat(3, 1), [SamplingConfig(temperature=2.0), SamplingConfig(**settings), SamplingConfig(top_k=1)])
    torch.testing.assert_close(both[1].softmax(-1), torch.tensor(expected) / sum(expected))


def test_equals_at_the_border_of_top_k_all_stay() -> None:
    assert restrict(torch.tensor([[2.0, 1.0, 1.0, 0.0]]), [SamplingConfig(top_k=2)]).isfinite().tolist() == [[True, True, True, False]]


# Mutations: look the number up among the logits' own order of size; use one number for the batch; probabilities of the unrestricted rows.
def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    tokens, log_probs = draw(LOGITS.repeat(20_000, 1), rows(20_000, SamplingConfig(min_p=0.1)))
    expected = torch.tensor([0.06, 0.5, 0.15, 0, 0.25]) / 0.96
    frequencies = torch.bincount(tokens, minlength=5) / 20_000
    assert frequencies[3] == 0
    torch.testing.assert_close(frequencies, expected, atol=0.015, rtol=0)  # four standard deviations
    torch.testing.assert_close(log_probs.exp(), expected[tokens])


# Mutations: `right=False`; single precision, in which the largest number is 1.
@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2**-53, 4)])
def test_no_number_draws_what_is_ruled_out(number: float, token: int) -> None:
    with mock.patch("torch.rand", return_value=torch.tensor([number], dtype=torch.float64)):
        tokens, log_probs = draw(LOGITS, rows(1, SamplingConfig(top_k=2)))
    assert tokens.tolist() == [token]
    assert log_probs.isfinite().all()


def test_greedy_rows_take_the_likeliest_and_tell_its_plain_log_prob() -> None:
    tokens, log_probs = draw(LOGITS.repeat(2, 1), [*rows(1, None), *rows(1, SamplingConfig(temperature=3.0, top_k=1))])
    assert tokens.tolist() == [1, 1]
    torch.testing.assert_close(log_probs, torch.tensor([0.5, 1.0]).log())

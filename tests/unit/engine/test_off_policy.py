"""Correction between trainer and rollout: golden values, and that what is rejected is nowhere any more."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from engine.algorithms.aggregation import Denominators, count
from engine.algorithms.off_policy import correction_statistics, kept, ratios, weights
from engine.algorithms.step import step_advantages
from engine.batch import Batch, join
from engine.config import AlgorithmConfig, ImportanceWeightsConfig, OffPolicyConfig, RejectionConfig
from engine.workers.base import TrainedWorker

# Ratios of the tokens: 1.5, 0.7 | 4, 0.5 | 1, and nothing at all. The column outside of every mask is poison.
RATIOS = [[1.5, 0.7, math.nan], [4.0, 0.5, math.inf], [1.0, math.nan, math.nan], [math.nan, math.inf, 0.0]]
MASK = torch.tensor([[True, True, False], [True, True, False], [True, False, False], [False, False, False]])
GROUP = torch.tensor([3, 3, 8, 8])
OLD = torch.tensor(RATIOS, dtype=torch.float64).log()
ROLLOUT = torch.zeros(4, 3, dtype=torch.float64)


def rejected(**settings: Any) -> list[list[bool]]:
    """What goes, on the two tokens that there are of each row."""
    return (MASK & ~kept(OLD, ROLLOUT, MASK, GROUP, RejectionConfig(**settings)))[:, :2].tolist()


@pytest.mark.parametrize(
    ("level", "values"),
    [
        ("token", [[1.5, 0.7], [4.0, 0.5], [1.0, 1.0]]),
        ("sequence", [[1.05, 1.05], [2.0, 2.0], [1.0, 1.0]]),  # 1.5 x 0.7, 4 x 0.5
        ("geometric", [[1.05**0.5] * 2, [2**0.5] * 2, [1.0, 1.0]]),  # Mutation: the mean over T columns instead of the row's tokens: 2^(1/3).
    ],
)
def test_ratios(level: str, values: list[list[float]]) -> None:
    found = ratios(OLD, ROLLOUT, MASK, level)
    torch.testing.assert_close(found[:3, :2], torch.tensor(values, dtype=torch.float64))
    # Mutation: multiply by the mask: NaN where there is no token.
    assert (found[~MASK] == 1).all()


def test_unknown_level() -> None:
    with pytest.raises(ValueError, match=r"'tokens'\. There are: token, sequence, geometric"):
        ratios(OLD, ROLLOUT, MASK, "tokens")


def test_ratios_do_not_overflow() -> None:
    # Mutation: clamp each token and not their sum: exp(1600).
    many = torch.full((1, 80), 20.0, dtype=torch.float64)
    found = ratios(many, torch.zeros_like(many), torch.ones_like(many, dtype=torch.bool), "sequence")
    assert found[0, 0].item() == pytest.approx(math.exp(20))


def test_weights_are_truncated_from_above_alone() -> None:
    # Mutation: clamp from below as well: 0.5 becomes 1.
    found = weights(OLD, ROLLOUT, MASK, ImportanceWeightsConfig(cap=1.4))
    torch.testing.assert_close(found[:2, :2], torch.tensor([[1.4, 0.7], [1.4, 0.5]], dtype=torch.float64))
    product = weights(OLD, ROLLOUT, MASK, ImportanceWeightsConfig(level="sequence", cap=1.4))
    torch.testing.assert_close(product[:2, 0], torch.tensor([1.05, 1.4], dtype=torch.float64))


def test_bounds_are_ratios() -> None:
    # 0.6 .. 1.4 rejects 1.5 and keeps 0.7. Mutation: compare log-ratios with the bounds: log 0.7 = -0.36 is below 0.6, and goes.
    assert rejected(unit="token", level="token", low=0.6, high=1.4) == [[True, False], [True, True], [False, False], [False, False]]
    # Bounds themselves are kept.
    assert rejected(unit="token", level="token", low=0.5, high=4.0) == [[False] * 2] * 4


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"unit": "sequence", "level": "token", "low": 0.1, "high": 2.0}, [False, True]),  # the 4
        ({"unit": "sequence", "level": "token", "low": 0.6, "high": 1.4}, [True, True]),
        ({"unit": "sequence", "level": "geometric", "low": 0.6, "high": 1.4}, [False, True]),  # 2^(1/2) = 1.41
        ({"unit": "sequence", "level": "geometric", "low": 0.6, "high": 1.5}, [False, False]),
        ({"unit": "sequence", "level": "sequence", "low": 0.6, "high": 1.5}, [False, True]),  # 2. Mutation: the geometric mean for both.
        ({"unit": "group", "level": "geometric", "low": 0.6, "high": 1.4}, [True, True]),  # Mutation: the sample alone.
    ],
)
def test_what_goes_goes_whole(settings: dict[str, Any], rows: list[bool]) -> None:
    # Mutation: reject the group of row 2 too, which agrees to the last bit.
    assert rejected(**settings) == [[row] * 2 for row in rows] + [[False] * 2] * 2


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_what_is_no_number_is_rejected(level: str) -> None:
    # Mutation: reject what is below or above: a NaN is neither.
    old = torch.tensor([[math.nan, 0.0], [0.0, 0.0]])
    left = kept(old, torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), torch.tensor([0, 1]), RejectionConfig(level=level))
    assert left.tolist() == [[False, False], [True, True]]


def step(**changes: Any) -> Batch:
    """Four samples of one prompt; the rollout was wrong about the third."""
    mask = torch.tensor([[False, True, True]] * 4)
    drawn = torch.full((4, 3), -1.0).where(mask, 0)
    old = drawn.clone()
    old[2, 1] += 1.0
    return Batch(
        {
            "response_mask": mask,
            "prompt": torch.zeros(4, dtype=torch.int64),
            "reward": torch.tensor([1.0, 0.0, 1.0, 0.0]),
            "old_log_probs": old,
            "rollout_log_probs": drawn,
            **changes,
        }
    )


PLAIN = AlgorithmConfig()
REJECTING = PLAIN.model_copy(update={"off_policy": OffPolicyConfig(rejection=RejectionConfig(high=1.4))})  # exp(1 / 2) = 1.65


def test_a_rejected_sample_leaves_its_groups_statistics() -> None:
    # Rewards 1, 0, 0 are left: mean 1/3, deviation sqrt((4/9 + 1/9 + 1/9) / 2) = 0.57735.
    # Mutation: take it out of the loss alone: the advantages are those of [1, 0, 1, 0], +-0.866.
    found = step_advantages(step(), REJECTING).tensors
    expected = torch.tensor([2 / 3, -1 / 3, 0, -1 / 3]) / (1 / 3**0.5)
    torch.testing.assert_close(found["advantages"][:, 1], expected, rtol=1e-5, atol=1e-6)
    assert found["loss_mask"].tolist() == [[False, True, True]] * 2 + [[False] * 3] + [[False, True, True]]


def test_a_sample_that_is_not_kept_leaves_them_too() -> None:
    rejected, taken_out = step_advantages(step(), REJECTING), step_advantages(step(kept=torch.tensor([True, True, False, True])), PLAIN)
    # Mutation: read the column for its statistics and not for the mask.
    assert all(torch.equal(rejected.tensors[name], taken_out.tensors[name]) for name in ("advantages", "loss_mask"))


def test_both_reasons_together() -> None:
    found = step_advantages(step(kept=torch.tensor([True, False, True, True])), REJECTING).tensors["loss_mask"].any(dim=1)
    assert found.tolist() == [True, False, False, True]


def test_where_nothing_can_go_no_mask_travels() -> None:
    assert set(step_advantages(step(), PLAIN).tensors) == {"advantages"}


def test_statistics() -> None:
    # Of the five tokens one has a ratio above 2, and the second row, two tokens, has a geometric mean above 1.4.
    config = OffPolicyConfig(weights=ImportanceWeightsConfig(), rejection=RejectionConfig(high=1.4))
    assert correction_statistics(OLD, ROLLOUT, MASK, GROUP, config).result() == {
        "policy/off_policy_clipped_fraction": 0.2,
        "policy/off_policy_rejected_fraction": 0.4,
    }
    assert correction_statistics(OLD, ROLLOUT, MASK, GROUP, None).result() == {
        "policy/off_policy_clipped_fraction": 0.0,
        "policy/off_policy_rejected_fraction": 0.0,
    }


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "corrects nothing without weights or rejection"),
        ({"rejection": {"unit": "token"}}, "set level=token"),
        ({"rejection": {"low": 1.0}}, "less than 1"),
        ({"rejection": {"high": 1.0}}, "greater than 1"),
        ({"weights": {"cap": 0.5}}, "greater than or equal to 1"),
        ({"weights": {"level": "group"}}, "'token', 'sequence' or 'geometric'"),
    ],
)
def test_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        OffPolicyConfig.model_validate(settings)


def test_updates_read_what_is_left() -> None:
    # Two of the eight tokens are the rejected sample's. Mutation: the response mask for every update: its denominators count what is not there.
    batch = step(input_ids=torch.zeros(4, 3), attention_mask=torch.ones(4, 3, dtype=torch.bool))
    worker = object.__new__(TrainedWorker)
    left = worker.columns(join(batch, step_advantages(batch, REJECTING)), ["advantages"])
    assert count(left.tensors["response_mask"]) == Denominators(tokens=6, sequences=3)
    assert set(left.tensors) == {"input_ids", "attention_mask", "response_mask", "advantages"}
    everything = worker.columns(join(batch, step_advantages(batch, PLAIN)), ["advantages"])
    assert count(everything.tensors["response_mask"]) == Denominators(tokens=8, sequences=4)

"""The learning rate over a stage, and that the configuration reaches AdamW."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import OptimizerConfig
from engine.training.optimizer import adamw, learning_rate


def rates(total_steps: int, **settings: object) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, **settings)  # type: ignore[arg-type]
    return [learning_rate(config, step, total_steps) for step in range(total_steps)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # Warm-up over 4 steps: 1/4, 2/4, 3/4, 4/4; then progress p = 0, 1/4, 1/2, 3/4 of the remaining 4.
        # Mutations: step / warmup_steps (the first step moves nothing); progress over all steps instead of the remaining ones.
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]),
        # (1 + cos(pi p)) / 2 at p = 1/4 and 3/4: (1 +- sqrt(1/2)) / 2.
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_golden_values(schedule: str, expected: list[float]) -> None:
    assert rates(8, warmup_steps=4, schedule=schedule) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_ends_at_zero_and_stays_there(schedule: str) -> None:
    config = OptimizerConfig(learning_rate=3.0, schedule=schedule)  # type: ignore[arg-type]
    # Mutation: no `min(1.0, ...)`: the rate turns negative, or rises again.
    assert [learning_rate(config, step, 10) for step in (10, 11, 15)] == pytest.approx([0.0] * 3, abs=1e-12)


@given(warmup=st.integers(0, 12), total=st.integers(1, 12), step=st.integers(0, 11), schedule=st.sampled_from(["constant", "linear", "cosine"]))
def test_always_between_zero_and_the_configured_rate(warmup: int, total: int, step: int, schedule: str) -> None:
    # A warm-up as long as the stage divides by no zero. Mutation: no `max(1, ...)`.
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=warmup, schedule=schedule)  # type: ignore[arg-type]
    rate = learning_rate(config, step, total)
    assert 0 <= rate <= 2.0
    # Before the last step of the stage something always moves.
    assert rate > 0 or step >= total


def test_every_setting_reaches_adamw() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.2, beta1=0.3, beta2=0.4, epsilon=0.5)
    (group,) = adamw([parameter], config).param_groups
    # Mutation: swap the betas, or leave one setting at torch's default.
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.1, (0.3, 0.4), 0.5, 0.2)
    assert group["params"] == [parameter]

"""Reward functions by the names that recipes use. A new one is a new file and a line here."""

from collections.abc import Callable

from engine.registry import Registry

RewardFunction = Callable[[str, str], float]
"""(response, ground truth) -> score."""

REWARDS: Registry[RewardFunction] = Registry(
    "reward",
    {
        "exact_match": "engine.rewards.exact_match:exact_match",
        "math_verify": "engine.rewards.math_verify:math_verify",
    },
)

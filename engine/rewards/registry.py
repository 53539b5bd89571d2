"""Reward functions by the names that recipes use. A new one is a new file and a line here."""

from collections.abc import Callable
from typing import Any

from engine.registry import Registry

RewardFunction = Callable[..., Any]
"""Of what its parameters name (`engine.rewards.calling`) -> score, or a dict with score and further numbers."""

REWARDS: Registry[RewardFunction] = Registry(
    "reward",
    {
        "exact_match": "engine.rewards.exact_match:exact_match",
        "format": "engine.rewards.format:follows_format",
        "length": "engine.rewards.length:length",
        "math_verify": "engine.rewards.math_verify:math_verify",
        "multiple_choice": "engine.rewards.multiple_choice:multiple_choice",
        "overlong": "engine.rewards.overlong:overlong",
        "regex": "engine.rewards.regex:regex",
        "rules": "engine.rewards.rules:rules",
    },
)

"""Reward: a list of regular expressions that an answer must, or must not, contain."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.rewards.answers import after_thinking
from engine.rewards.types import Canary, Sample


def rules(response: str, rules: Sequence[Mapping[str, Any]], ignore_case: bool = True) -> dict[str, float]:
    """Share of the rules, by weight, that the text after the thinking keeps; and of each rule, by its name, 1 if it is kept, else 0.

    Args:
        response: as drawn.
        rules: each with name, pattern, must (True: the text contains the pattern; False: it does not) and weight.
        ignore_case: whether small and capital letters are the same.
    """
    answer, flags = after_thinking(response), re.IGNORECASE if ignore_case else re.NOFLAG
    kept = {rule["name"]: (re.search(rule["pattern"], answer, flags) is not None) == rule["must"] for rule in rules}
    weight = sum(rule["weight"] for rule in rules)
    return {"score": sum(rule["weight"] * kept[rule["name"]] for rule in rules) / weight} | {name: float(value) for name, value in kept.items()}


_KNOWN = (
    {"name": "greets", "pattern": r"^(hello|good day)\b", "must": True, "weight": 1.0},
    {"name": "promises", "pattern": r"\bguarantee", "must": False, "weight": 3.0},
)
CANARIES = {
    "rules": (
        Canary(Sample("Hello, it will be there soon.", ""), 1.0, {"rules": _KNOWN}),
        Canary(Sample("Hello, I guarantee it.", ""), 0.25, {"rules": _KNOWN}),
    )
}

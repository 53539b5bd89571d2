r"""Reward: the letter of a choice, in \boxed{}, after "answer", or alone."""

import re

from engine.rewards.answers import after_thinking, last_boxed
from engine.rewards.types import Canary, Sample

_LETTER = re.compile(r"[\s(\[*]*([A-Za-z])[\s)\].:*]*")
"""A letter alone, or as `(B)`, `B.`, `**B**`."""
_STATED = re.compile(r"(?i:\banswer(?:\s+is)?)\s*:?\s*[(\[*]*([A-Z])\b")
"""`Answer: B`, `the answer is (B)`. Small letters would take the article for a choice."""


def multiple_choice(response: str, ground_truth: str) -> float:
    r"""1 if the letter chosen after the thinking is the ground truth's, else 0.

    It is looked for in the last \boxed{}; without a box, behind the last "answer" or "answer is"; without that, in a text that is a letter alone.
    A box with something else in it chooses nothing.

    Raises:
        ValueError: the ground truth is no letter, which is a fault of the data.
    """
    expected = _LETTER.fullmatch(ground_truth)
    if expected is None:
        raise ValueError(f"multiple_choice needs a letter as ground truth, not {ground_truth!r}; correct it in the data, or use exact_match")
    answer = after_thinking(response)
    boxed, stated = last_boxed(answer), _STATED.findall(answer)
    chosen = _LETTER.fullmatch(boxed if boxed is not None else stated[-1] if stated else answer)
    return float(chosen is not None and chosen[1].upper() == expected[1].upper())


CANARIES = {
    "multiple_choice": (
        Canary(Sample("A is too small. The answer is (B).", "B"), 1.0),
        Canary(Sample("B is too small. The answer is (A).", "B"), 0.0),
    )
}

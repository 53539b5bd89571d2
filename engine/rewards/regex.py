"""Reward: a regular expression, which the answer contains, or which finds in it what is to be the ground truth."""

import re

from engine.rewards.answers import after_thinking
from engine.rewards.types import Canary, Sample


def regex(response: str, ground_truth: str, pattern: str, equals_ground_truth: bool = False) -> float:
    """1 if the text after the thinking contains the pattern, else 0; with `equals_ground_truth` if the last match is the ground truth.

    What is compared is the first group of the last match, or all of it where the pattern has no group, letter for letter but for white space
    at both ends.
    """
    answer = after_thinking(response)
    if not equals_ground_truth:
        return float(re.search(pattern, answer) is not None)
    found = None
    for found in re.finditer(pattern, answer):  # noqa: B007 - the last one is used
        pass
    if found is None:
        return 0.0
    # A group that took no part in the match is None.
    return float((found[1 if found.re.groups else 0] or "").strip() == ground_truth.strip())


CANARIES = {
    "regex": (
        Canary(Sample("It is 4. No, it is 5.", "5"), 1.0, {"pattern": r"it is (\d+)", "equals_ground_truth": True}),
        Canary(Sample("It is 5. No, it is 4.", "5"), 0.0, {"pattern": r"it is (\d+)", "equals_ground_truth": True}),
    )
}

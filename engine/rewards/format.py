"""Reward: the form of a response, whatever it says."""

import re

from engine.rewards.types import Canary, Sample

THINK_THEN_ANSWER = r"<think>(?:(?!</?think>).)*</think>\s*(?=\S)(?:(?!</?think>).)*"
"""One block of thinking at the beginning, and something after it."""


def follows_format(response: str, pattern: str | None = None) -> float:
    """1 if the whole response, without white space at both ends, matches a regular expression in which `.` is any character, else 0.

    None stands for one block `<think>..</think>` at the beginning, and an answer after it.
    """
    return float(re.fullmatch(pattern or THINK_THEN_ANSWER, response.strip(), re.DOTALL) is not None)


CANARIES = {
    "follows_format": (
        Canary(Sample("<think>2 + 3</think>\n5", ""), 1.0, {}),
        Canary(Sample("<think>2 + 3 5", ""), 0.0, {}),
    )
}

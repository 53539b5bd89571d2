"""Reward: the boxed answer, letter for letter."""

from engine.rewards.answers import after_thinking, last_boxed
from engine.rewards.types import Canary, Sample


def exact_match(response: str, ground_truth: str) -> float:
    r"""1 if the last \boxed{} after the thinking holds exactly the ground truth, else 0.

    Strings are compared, with white space at both ends taken off: `+5`, `05` and `5.0` are not `5`. Where other ways of writing a number
    should count, use `math_verify`.
    """
    answer = last_boxed(after_thinking(response))
    return float(answer is not None and answer.strip() == ground_truth.strip())


CANARIES = {
    "exact_match": (
        Canary(Sample(r"2 + 3: \boxed{5}", "5"), 1.0),
        Canary(Sample(r"2 + 3: \boxed{6}", "5"), 0.0),
    )
}

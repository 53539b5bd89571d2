"""Reward: the boxed answer, letter for letter."""

from engine.rewards.answers import after_thinking, last_boxed, unfinished_thinking
from engine.rewards.types import Canary, Sample


def exact_match(response: str, ground_truth: str, require_think: bool = False) -> float:
    r"""1 if the last \boxed{} after the thinking holds exactly the ground truth, else 0; with `require_think` 0 too where no thinking ends.

    Strings are compared, with white space at both ends taken off: `+5`, `05` and `5.0` are not `5`. Where other ways of writing a number
    should count, use `math_verify`.
    """
    if require_think and unfinished_thinking(response):
        return 0.0
    answer = last_boxed(after_thinking(response))
    return float(answer is not None and answer.strip() == ground_truth.strip())


CANARIES = {
    "exact_match": (
        Canary(Sample(r"<think></think>2 + 3: \boxed{5}", "5"), 1.0),
        Canary(Sample(r"<think></think>2 + 3: \boxed{6}", "5"), 0.0),
    )
}

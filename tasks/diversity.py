"""How different the responses to a question are: distinct 4-grams."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

NGRAM = 4

Units = Sequence[Hashable]
"""Tokens, or words, of one response."""


@dataclass(frozen=True, slots=True)
class Diversity:
    """Of the responses to all questions."""

    value: float
    """Mean over questions of the share of their 4-grams that are distinct, in (0, 1]."""
    used_share: float
    """Responses that were long enough, of all."""


def diversity(questions: Sequence[Sequence[Units]], prefix_length: int | None) -> Diversity:
    """Of each question the 4-grams of all its responses are pooled: distinct ones over all of them; then the mean over questions.

    Args:
        questions: the responses to each.
        prefix_length: units of each response that count; shorter responses are left out, and questions without any that is left. A share of distinct
            n-grams falls as the text gets longer, whatever the policy, so that only equal lengths compare. None takes responses as they are (the
            definition that POLARIS published, with words).

    Raises:
        ValueError: no response has 4 units that count.
    """
    shares, used = [], 0
    for responses in questions:
        if prefix_length is not None:
            responses = [response[:prefix_length] for response in responses if len(response) >= prefix_length]
        counted = [response for response in responses if len(response) >= NGRAM]
        grams = [tuple(response[start : start + NGRAM]) for response in counted for start in range(len(response) - NGRAM + 1)]
        if grams:
            shares.append(len(set(grams)) / len(grams))
            used += len(counted)
    if not shares:
        raise ValueError(f"no response has {prefix_length or NGRAM} units")
    return Diversity(sum(shares) / len(shares), used / sum(map(len, questions)))


def common_length(responses: Sequence[Units]) -> int:
    """The length that nine in ten of them reach, at least 4."""
    lengths = sorted(map(len, responses))
    return max(NGRAM, lengths[len(lengths) // 10])

"""Reward: the length of a response in tokens."""

from engine.rewards.types import Canary, Sample


def length(response_tokens: int, target_tokens: int | None = None, min_tokens: int | None = None, max_tokens: int | None = None) -> float:
    """With a target: 1 at that length, falling linearly to 0 at nothing and at twice the target. With bounds: 1 within them, else 0.

    Args:
        response_tokens: as drawn, the end token included.
        target_tokens: instead of bounds.
        min_tokens, max_tokens: bounds, which belong to what is allowed; None leaves one out.
    """
    if target_tokens is not None:
        return max(0.0, 1.0 - abs(response_tokens - target_tokens) / target_tokens)
    return float((min_tokens is None or response_tokens >= min_tokens) and (max_tokens is None or response_tokens <= max_tokens))


CANARIES = {
    "length": (
        Canary(Sample("", "", response_tokens=100), 1.0, {"target_tokens": 100}),
        Canary(Sample("", "", response_tokens=125), 0.75, {"target_tokens": 100}),
        Canary(Sample("", "", response_tokens=125), 0.0, {"max_tokens": 124}),
    )
}

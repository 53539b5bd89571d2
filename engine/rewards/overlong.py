"""Reward: DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, equation 13)."""

from engine.algorithms.overlong import overlong_penalty
from engine.rewards.types import Canary, Sample


def overlong(response_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """0 up to `max_tokens - buffer_tokens` tokens, then linearly down to -1 at `max_tokens`, and -1 beyond."""
    return overlong_penalty(response_tokens, max_tokens, buffer_tokens)


CANARIES = {
    "overlong": (
        Canary(Sample("", "", response_tokens=80), 0.0, {"max_tokens": 100, "buffer_tokens": 20}),
        Canary(Sample("", "", response_tokens=95), -0.75, {"max_tokens": 100, "buffer_tokens": 20}),
        Canary(Sample("", "", response_tokens=101), -1.0, {"max_tokens": 100, "buffer_tokens": 20}),
    )
}

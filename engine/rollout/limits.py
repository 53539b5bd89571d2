"""What every backend refuses before it begins."""

from collections.abc import Sequence

from engine.rollout.backend import Request


def check_prompts(requests: Sequence[Request], max_context_tokens: int) -> None:
    """Raises `ValueError` when a prompt leaves no room for a response."""
    longest = max((len(request.prompt_tokens) for request in requests), default=0)
    if longest >= max_context_tokens:
        raise ValueError(
            f"a prompt of {longest} tokens leaves no room for a response in max_context_tokens={max_context_tokens}; choose a larger one"
        )

"""The soft overlong punishment of DAPO (arXiv:2503.14476, equation 13). Imports no torch: rewards are functions of plain numbers."""


def overlong_penalty(tokens: float, max_tokens: int, buffer_tokens: int) -> float:
    """0 up to `max_tokens - buffer_tokens`, then linearly down to -1 at `max_tokens`, and -1 beyond.

    Args:
        tokens: length of the response.
        max_tokens: the cap.
        buffer_tokens: length of the slope, at least 1.
    """
    return -min(1.0, max(0.0, (tokens - (max_tokens - buffer_tokens)) / buffer_tokens))

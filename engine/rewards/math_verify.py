"""Reward: mathematical equality, decided by the `math-verify` library (github.com/huggingface/Math-Verify)."""

import logging
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from engine.rewards.answers import after_thinking, last_boxed, unfinished_thinking
from engine.rewards.types import Canary, Sample

# It warns that its deadlines are off, which is meant: they are signals, and cannot stop a long C call. The runner kills the process.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# A box goes before anything else in the text.
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def math_verify(response: str, ground_truth: str, require_think: bool = False, require_box: bool = False) -> float:
    r"""1 if the answer after the thinking equals the ground truth as mathematics (numbers, fractions, LaTeX, sets, intervals), else 0.

    The answer is what stands in \boxed{}, or else the last expression. One that cannot be read, or not be shown
    equal, is no right answer and scores 0. Several boxes are read as a set.

    Args:
        response: as drawn.
        ground_truth: of the row.
        require_think: 0 for a response that never says `</think>`.
        require_box: the answer is what stands in the last box alone; 0 where there is none.

    Raises:
        ValueError: the ground truth cannot be read, which is a fault of the data.
    """
    expected = _expressions(rf"\boxed{{{ground_truth}}}")
    if not expected:
        raise ValueError(f"math_verify cannot read the ground truth {ground_truth!r}; correct it in the data, or use exact_match")
    answer = after_thinking(response)
    if require_box:
        box = last_boxed(answer)
        answer = "" if box is None else rf"\boxed{{{box}}}"
    if not answer or (require_think and unfinished_thinking(response)):
        return 0.0
    return float(verify(expected, _expressions(answer), timeout_seconds=None))


def _expressions(text: str) -> list[Any]:
    """What `math-verify` found: the parsed answer and its text, or nothing."""
    return parse(text, extraction_config=_EXTRACTION, parsing_timeout=None)


CANARIES = {
    "math_verify": (
        Canary(Sample(r"<think></think>a half: \boxed{\frac{1}{2}}", "0.5"), 1.0),
        Canary(Sample(r"<think></think>a third: \boxed{\frac{1}{3}}", "0.5"), 0.0),
    )
}

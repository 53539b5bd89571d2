r"""Finding the final answer in a response: what stands after the thinking, and in the last \boxed{}."""

import re

END_OF_THINKING = "</think>"

_TOKENS = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
"""`\\.` takes escaped braces, which group nothing, out of the count."""


def after_thinking(response: str) -> str:
    """What follows the last `</think>`; the whole response if there is none."""
    return response.rpartition(END_OF_THINKING)[2]


def unfinished_thinking(response: str) -> bool:
    """Whether the response never says `</think>`."""
    return END_OF_THINKING not in response


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} whose brace closes, inner braces included; None if there is none.

    One pass over the text: a response that opens a thousand boxes costs no more than another.
    """
    best: tuple[int, str] | None = None
    open_braces: list[int | None] = []  # where a box's content starts; None for a plain brace
    for token in _TOKENS.finditer(text):
        if token[0] == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None and (best is None or start > best[0]):
                best = start, text[start : token.start()]
        elif token[0].endswith("{") and token[0] != r"\{":
            open_braces.append(None if token[0] == "{" else token.end())
    return None if best is None else best[1]

"""Stop strings, the same for every backend."""

from collections.abc import Sequence
from typing import Any


class StopTexts:
    """Reads one response token by token and says when one of its stop texts is complete.

    Text may begin and end inside tokens, and a character may take several tokens (bytes): only what is certain is compared. Special tokens
    are left out of the text, as reward functions are given it; one of them ends a response where a stop text is exactly its name.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._longest = max(map(len, texts))
        self._tokens: list[int] = []
        self._read = 0
        """Tokens whose text is part of `_tail`. The others still wait for the rest of a character."""
        self._tail = ""

    def complete(self, token: int) -> bool:
        """True when `token` completes a stop text."""
        if self._decode([token], skip_special_tokens=False) in self._texts:
            return True
        self._tokens.append(token)
        known, longer = self._decode(self._tokens[: self._read]), self._decode(self._tokens)
        if longer.endswith("\N{REPLACEMENT CHARACTER}") or len(longer) <= len(known):
            return False
        self._tail += longer[len(known) :]
        found = any(text in self._tail for text in self._texts)
        self._tail = self._tail[-self._longest :]
        # What was read last stays as context: some tokenizers write a token differently where a text begins.
        self._tokens = self._tokens[self._read :]
        self._read = len(self._tokens)
        return found

    def _decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

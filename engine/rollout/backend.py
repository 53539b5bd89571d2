"""What the hybrid actor asks of a generation engine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.config import SamplingConfig


@dataclass(frozen=True, slots=True)
class Request:
    """One response to be drawn."""

    prompt_tokens: Sequence[int]
    seed: int
    """Of this response's own random stream; ignored by greedy requests."""
    sampling: SamplingConfig | None
    """None decodes greedily."""
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Response:
    """One response as it was drawn."""

    tokens: list[int]
    """The end-of-turn token included, where it was reached."""
    log_probs: list[float]
    """Of each token under the distribution that it was drawn from (temperature applied)."""
    finished: bool
    """False when `max_tokens` cut it off."""


class RolloutBackend(Protocol):
    """A generation engine on this rank."""

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """Responses in the order of the requests."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes every tensor of the model by its checkpoint name, and forgets what it had cached under the old ones."""
        ...

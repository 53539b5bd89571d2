"""What the hybrid actor asks of a generation engine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.config import LoRAConfig, RolloutConfig, SamplingConfig
from engine.control.mesh import Mesh


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
    """Of each token under the distribution that it was drawn from (temperature, top_p, top_k, min_p applied); greedy ones at temperature 1."""
    finished: bool
    """False when `max_tokens` cut it off."""


class RolloutBackend(Protocol):
    """A generation engine on this rank, or this rank's share of one that several ranks run together.

    With `lora` it computes with the weights of `model_directory` and an adapter beside them, never merged; without, with what `load_weights`
    gives it.
    """

    def __init__(
        self,
        model_directory: Path,
        config: RolloutConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_context_tokens: int,
        tokenizer: Any,
        lora: LoRAConfig | None,
    ) -> None: ...

    @classmethod
    def mesh(cls, config: RolloutConfig, ranks: int) -> Mesh:
        """Which part of the requests each rank is given; asked by the controller, without a model. ValueError where `ranks` does not fit."""
        ...

    def stream(self, requests: Sequence[Request]) -> Iterator[tuple[int, Response]]:
        """Each response as soon as it is finished, with the position of its request. Ranks that share an engine are given the same requests."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes every tensor of the model by its checkpoint name, and forgets what it had cached under the old ones."""
        ...

    def load_adapter(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Takes the whole adapter by peft's checkpoint names, and forgets the one before with what was cached under it. Of an engine with `lora`."""
        ...

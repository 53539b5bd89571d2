"""What the hybrid actor asks of a generation engine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.config import LengthExtensionConfig, LoRAConfig, RolloutConfig, SamplingConfig
from engine.control.mesh import Mesh
from engine.reshard.layout import Tensor
from engine.reshard.proof import Proof
from engine.reshard.recording import Wanted
from engine.reshard.synchronise import Arrivals, Loaded


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

    With `lora` it computes with the weights of `model_directory` and an adapter beside them, never merged; without, with what `receive`
    gives it.
    """

    weight_version: int | None
    """Of the weights that it computes with; None while they are not all the same version's."""

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

    def extend(self, extension: LengthExtensionConfig | None) -> None:
        """From now on positions are embedded like this; with None as the model has it. What was cached otherwise is forgotten.

        Not while a stream is open. ValueError where they cannot be.
        """
        ...

    def stream(self, requests: Sequence[Request]) -> Iterator[tuple[int, Response]]:
        """Each response as soon as it is finished, with the position of its request. Ranks that share an engine are given the same requests."""
        ...

    def wants(self, tensors: Mapping[str, Tensor]) -> Wanted:
        """Which slices of the checkpoint's tensors this rank takes, and where they land. ValueError names a tensor that it has no place for."""
        ...

    def receive(self, arrivals: Arrivals, proof: Proof) -> Loaded:
        """Takes every slice that it wants, and forgets what it had cached under the old weights.

        Shows the proof each slice where it landed (`landed`), and each packed weight (`packed`). From then on it has the proof's version.
        """
        ...

    def load_adapter(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Takes the whole adapter by peft's checkpoint names, and forgets the one before with what was cached under it. Of an engine with `lora`."""
        ...

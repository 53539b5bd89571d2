"""What a trained role asks of a training backend; neither the roles nor the loop change for another one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from engine.batch import Batch
from engine.config import LengthExtensionConfig, OptimizerConfig, TrainingConfig
from engine.control.mesh import Mesh
from engine.reshard.layout import Sharding

Head = Literal["policy", "value"]
"""`policy`: the model's own output head; `value`: one number a token, from a head that starts at zero."""


Measure = Literal["entropy", "entropy_temperature_1", "squared_probabilities"]
"""Of the distribution that a token is drawn from, p_v over the vocabulary: its entropy in nats, at the sampling temperature and at 1; sum_v p_v^2."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the policy says of each token, at the sampling temperature. [B, T] each, float32 (float64 for a float64 model), with gradient where
    autograd is on; 0 where the mask is False."""

    log_probs: torch.Tensor
    measures: Mapping[Measure, torch.Tensor]
    """Those that were asked for."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """How one optimizer step went."""

    gradient_norm: float
    """L2 over all parameters of all ranks, before clipping."""
    learning_rate: float
    consecutive_skips: int
    """So many steps in a row, this one the last, had a norm that was not finite, and left the weights as they were; 0 after one that did not."""


class TrainingBackend(Protocol):
    """A sharded model and its optimizer on this rank. Every method is a collective over the training ranks unless it says otherwise."""

    config: Any
    """The model's Hugging Face configuration."""
    data_group: dist.ProcessGroup | None
    """Ranks over which the data is divided, this one among them; None where that is all ranks of the default group."""

    def __init__(
        self,
        model_directory: Path,
        head: Head,
        config: TrainingConfig,
        dtype: torch.dtype,
        device: torch.device,
        sharding: Sharding | None = None,
    ) -> None:
        """`sharding` is how its shards would lie nearest to where a rollout needs them; a backend with a layout of its own may leave it."""

    @classmethod
    def mesh(cls, config: TrainingConfig, ranks: int) -> Mesh:
        """Which part of the data each rank is given; asked by the controller, without a model. ValueError where `ranks` does not fit."""
        ...

    def extend(self, extension: LengthExtensionConfig | None) -> None:
        """From now on positions are embedded like this; with None as the model has it. ValueError where they cannot be. No collective."""
        ...

    def load(self, model_directory: Path) -> None:
        """Takes the weights of a Hugging Face directory of the same architecture; a value head goes back to zero."""
        ...

    def reset_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        """A fresh optimizer and schedule; `total_steps` optimizer steps end the schedule."""
        ...

    def score(self, batch: Batch, temperature: float, measures: Sequence[Measure] = ()) -> TokenScores:
        """Log-prob of the response tokens, and measures of what they were drawn from, each of which takes time of its own.

        Reads input_ids, attention_mask and response_mask [B, T]. Head `policy`.
        """
        ...

    def values(self, batch: Batch) -> torch.Tensor:
        """[B, T] float32 with gradient: the value of the state before each response token, 0 elsewhere. Head `value`."""
        ...

    def optimizer_step(self, micro_batches: Sequence[Batch], loss: Callable[[Batch], torch.Tensor]) -> OptimizerStep:
        """One update by the sum of `loss` over all micro-batches of all ranks. Every rank brings as many micro-batches."""
        ...

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """This rank's shards (DTensors) by their names in the model, in the memory that is trained. No collective."""
        ...

    def full_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the model by its checkpoint name, whole, on every rank, one at a time; adapters merged."""
        ...

    def adapter_weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The adapters alone, whole, on every rank's host, by peft's checkpoint names; empty without LoRA."""
        ...

    def without_adapter(self) -> AbstractContextManager[None]:
        """Inside, the model computes as the base that its adapters sit on; RuntimeError without LoRA. No collective."""
        ...

    def state(self) -> dict[str, Any]:
        """This rank's shards of the parameters, the optimizer and the schedule, copied to the host. No collective."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """What `state` gave, at the same world size. No collective."""
        ...

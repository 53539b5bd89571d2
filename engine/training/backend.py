"""What the hybrid actor asks of a training backend; the loop does not change for another one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batch import Batch
from engine.config import OptimizerConfig


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the policy says of each token, at the sampling temperature."""

    log_probs: torch.Tensor
    """[B, T] float32, with gradient; 0 where the mask is False."""
    entropy: torch.Tensor
    """[B, T] float32, nats, without gradient; 0 where the mask is False."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """How one optimizer step went."""

    gradient_norm: float
    """L2 over all parameters of all ranks, before clipping."""
    learning_rate: float
    skipped: bool
    """The norm was not finite, and the weights are as before."""


class TrainingBackend(Protocol):
    """A sharded model and its optimizer on this rank. Every method is a collective over the training ranks unless it says otherwise."""

    def reset_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        """A fresh optimizer and schedule; `total_steps` optimizer steps end the schedule."""
        ...

    def score(self, input_ids: torch.Tensor, mask: torch.Tensor, temperature: float) -> TokenScores:
        """Log-prob and entropy of the tokens of `input_ids` [B, T] where `mask` [B, T] is True."""
        ...

    def optimizer_step(self, micro_batches: Sequence[Batch], loss: Callable[[Batch], torch.Tensor]) -> OptimizerStep:
        """One update by the sum of `loss` over all micro-batches of all ranks. Every rank brings as many micro-batches."""
        ...

    def full_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the model by its checkpoint name, whole, on every rank, one at a time."""
        ...

"""Training with PyTorch's fully sharded data parallelism, second version (`fully_shard`): every parameter is a DTensor."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from engine.batch import Batch
from engine.config import OptimizerConfig
from engine.training.backend import OptimizerStep, TokenScores
from engine.training.optimizer import adamw, learning_rate


class NonFiniteGradientError(RuntimeError):
    """Too many optimizer steps in a row had a gradient norm that was not finite."""


class FSDPBackend:
    """One rank's shard of the model. Parameters are kept in float32; `dtype` is what forward and backward compute in."""

    def __init__(self, model_directory: Path, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32, attn_implementation="sdpa")
        self.config = self.model.config
        self._mesh = mesh
        # Gradients are summed in float32 whatever the layers compute in.
        precision = MixedPrecisionPolicy(param_dtype=None if dtype is torch.float32 else dtype, reduce_dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        self._sharded: FSDPModule = fully_shard(self.model, mesh=mesh, mp_policy=precision)
        self.model.train()
        self._optimizer: torch.optim.AdamW | None = None

    def reset_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        """See `TrainingBackend`."""
        self._optimizer_config = config
        self._optimizer = adamw(self.model.parameters(), config)
        self._steps_done = 0
        self._total_steps = total_steps
        self._consecutive_skips = 0

    def score(self, input_ids: torch.Tensor, mask: torch.Tensor, temperature: float) -> TokenScores:
        """See `TrainingBackend`. Position 0 has no log-prob, so `mask[:, 0]` must be False.

        Padding stands on the right, where causal attention keeps it out of every real token: no attention mask is needed.
        """
        hidden = self.model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        wanted = mask[:, 1:]
        # Only the masked positions go through the softmax: [N, V] with N the number of response tokens.
        logits = hidden[wanted].float() / temperature
        log_softmax = F.log_softmax(logits, dim=-1)
        chosen = log_softmax.gather(-1, input_ids[:, 1:][wanted].unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            spread = -(log_softmax.exp() * log_softmax).sum(-1)
        zeros = torch.zeros(input_ids.shape, dtype=torch.float32, device=input_ids.device)
        return TokenScores(log_probs=zeros.masked_scatter(mask, chosen), entropy=zeros.masked_scatter(mask, spread))

    def optimizer_step(self, micro_batches: Sequence[Batch], loss: Callable[[Batch], torch.Tensor]) -> OptimizerStep:
        """See `TrainingBackend`. Raises `NonFiniteGradientError` after `max_consecutive_skips` skipped steps in a row."""
        if self._optimizer is None:
            raise RuntimeError("reset_optimizer must be called before the first optimizer step of a stage")
        config = self._optimizer_config
        self._optimizer.zero_grad(set_to_none=True)
        for position, micro_batch in enumerate(micro_batches):
            # Gradients are reduced over the ranks once, after the last backward.
            self._sharded.set_requires_gradient_sync(position == len(micro_batches) - 1)
            # FSDP averages over the ranks; losses carry global denominators and must be summed.
            torch.autograd.backward(loss(micro_batch) * self._mesh.size())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_gradient_norm)
        gradient_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        rate = learning_rate(config, self._steps_done, self._total_steps)
        skipped = not torch.isfinite(torch.tensor(gradient_norm)).item()
        self._steps_done += 1
        self._consecutive_skips = self._consecutive_skips + 1 if skipped else 0
        if self._consecutive_skips >= config.max_consecutive_skips:
            raise NonFiniteGradientError(
                f"{self._consecutive_skips} optimizer steps in a row had a non-finite gradient norm "
                f"(optimizer.max_consecutive_skips={config.max_consecutive_skips}). Lower learning_rate or look at the last batch."
            )
        if not skipped:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        return OptimizerStep(gradient_norm=gradient_norm, learning_rate=rate, skipped=skipped)

    def full_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainingBackend`. Tensors are cast before they go over the wire; a tied output head is not given a second time."""
        self._sharded.reshard()  # after a forward the root's own parameters stay whole, as plain tensors
        for name, parameter in self.model.named_parameters():
            shard = parameter.detach().to(dtype)
            yield name, shard.full_tensor() if isinstance(shard, DTensor) else shard

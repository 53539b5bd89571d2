"""Training with PyTorch's fully sharded data parallelism, second version (`fully_shard`): every parameter is a DTensor."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from engine import rope
from engine.batch import Batch
from engine.config import LengthExtensionConfig, OptimizerConfig, TrainingConfig
from engine.control.mesh import Mesh
from engine.reshard.layout import Sharding, plain_mesh
from engine.training.backend import Head, Measure, OptimizerStep, TokenScores
from engine.training.build import build, decoder_layers, read
from engine.training.lora import adapter_weights, adapters_off, base_name, merged_weights, starting_adapters
from engine.training.optimizer import adamw, learning_rate
from engine.training.scoring import ResponseModel, ValueModel
from engine.training.shards import clip_gradients, device_mesh, load_optimizer_state, local, optimizer_state, take, to_host, whole


class FSDPBackend:
    """One rank's shard of the model. Parameters are kept in float32 (float64 for that `dtype`); `dtype` is what forward and backward compute in."""

    data_group: dist.ProcessGroup | None = None

    def __init__(
        self,
        model_directory: Path,
        head: Head,
        config: TrainingConfig,
        dtype: torch.dtype,
        device: torch.device,
        sharding: Sharding | None = None,
    ) -> None:
        if config.offload and device.type == "cpu":
            raise ValueError("training.offload=true moves state from a GPU to the host, and these ranks run on the host; leave it out")
        self._device = device
        self._reduces_every_pass = config.shard_gradients_every_pass
        self._kept = torch.promote_types(dtype, torch.float32)
        model = build(model_directory, head, config, self._kept)
        self.config = model.causal.config
        self._data_mesh = self._arrange(model, config, sharding)
        self._shard(model, dtype, CPUOffloadPolicy() if config.offload else OffloadPolicy(), sharding.shard_dimension if sharding else {})
        self._model = model
        self._optimizer: torch.optim.AdamW | None = None

    @classmethod
    def mesh(cls, config: TrainingConfig, ranks: int) -> Mesh:
        """See `TrainingBackend`."""
        if config.shard_ranks is not None and ranks % config.shard_ranks:
            raise ValueError(f"training.shard_ranks={config.shard_ranks} does not divide the {ranks} ranks of the pool; choose a divisor")
        return Mesh.grouped(ranks)

    def _arrange(self, model: ResponseModel, config: TrainingConfig, sharding: Sharding | None) -> DeviceMesh:
        """The mesh over which data is divided; two-dimensional (copies x shards) for hybrid sharding, as in arXiv:2304.11277, section 3.2.2."""
        ranks = dist.get_world_size()
        self.mesh(config, ranks)
        shards = config.shard_ranks or ranks
        mesh = sharding.mesh if sharding else plain_mesh(ranks, shards)
        order = torch.tensor(mesh).squeeze(-1)  # copies x shards
        if shards == ranks:
            return device_mesh(order[0], self._device.type, ("shard",))
        return device_mesh(order, self._device.type, ("replicate", "shard"))

    def _shard(self, model: ResponseModel, dtype: torch.dtype, offload: OffloadPolicy, dimensions: Mapping[str, int]) -> None:
        # Gradients are summed in float32 whatever the layers compute in.
        mixed = MixedPrecisionPolicy(param_dtype=None if dtype is self._kept else dtype, reduce_dtype=self._kept)
        placed = {parameter: dimensions.get(name, 0) for name, parameter in model.causal.named_parameters()}
        settings: dict[str, Any] = {
            "mesh": self._data_mesh,
            "offload_policy": offload,
            "shard_placement_fn": lambda parameter: Shard(placed.get(parameter, 0)),
        }
        for layer in decoder_layers(model.causal):
            fully_shard(layer, mp_policy=mixed, **settings)
        if isinstance(model, ValueModel):
            fully_shard(model.value_head, mp_policy=MixedPrecisionPolicy(), **settings)
        self._root: FSDPModule = fully_shard(model, mp_policy=mixed, **settings)

    def extend(self, extension: LengthExtensionConfig | None) -> None:
        """See `TrainingBackend`."""
        rope.extend(self._model.causal, self.config, extension)

    def load(self, model_directory: Path) -> None:
        """See `TrainingBackend`. ValueError where the directory holds another architecture. Adapters go back to their start."""
        found = dict(read(model_directory, self._kept).named_parameters()) | dict(starting_adapters(self._model.causal))
        for name, parameter in self.parameters().items():
            if name.startswith("value_head."):
                local(parameter).zero_()
                continue
            name = base_name(name)
            if name not in found or found[name].shape != parameter.shape:
                raise ValueError(f"{model_directory} does not hold the model that is being trained: {name} {tuple(parameter.shape)} is not in it")
            take(parameter, found[name].detach())

    def reset_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        """See `TrainingBackend`."""
        self._optimizer_config = config
        self._optimizer = adamw([parameter for parameter in self.parameters().values() if parameter.requires_grad], config)
        self._steps_done = 0
        self._total_steps = total_steps
        self._consecutive_skips = 0

    def score(self, batch: Batch, temperature: float, measures: Sequence[Measure] = ()) -> TokenScores:
        """See `TrainingBackend`. Position 0 has no log-prob: ValueError where the mask is True there."""
        log_probs, *found = self._model(*self._inputs(batch), temperature, measures)
        return TokenScores(log_probs, dict(zip(measures, found, strict=True)))

    def values(self, batch: Batch) -> torch.Tensor:
        """See `TrainingBackend`. ValueError where the mask is True at position 0, which has no state before it."""
        return self._model(*self._inputs(batch))

    def _inputs(self, batch: Batch) -> list[torch.Tensor]:
        if batch.tensors["response_mask"][:, 0].any():
            raise ValueError("response_mask is True at position 0; a response needs at least one token before it")
        return [batch.tensors[name].to(self._device) for name in ("input_ids", "attention_mask", "response_mask")]

    def optimizer_step(self, micro_batches: Sequence[Batch], loss: Callable[[Batch], torch.Tensor]) -> OptimizerStep:
        """See `TrainingBackend`. The norm is that of all ranks together, so that all of them skip, or none does."""
        if self._optimizer is None:
            raise RuntimeError("reset_optimizer must be called before the first optimizer step of a stage")
        config = self._optimizer_config
        self._optimizer.zero_grad(set_to_none=True)
        for position, micro_batch in enumerate(micro_batches):
            # Else gradients are reduced over the ranks once, after the last backward.
            self._root.set_requires_gradient_sync(self._reduces_every_pass or position == len(micro_batches) - 1)
            # FSDP averages over the ranks that divide the data; losses carry global denominators and must be summed.
            torch.autograd.backward(loss(micro_batch) * self._data_mesh.size())
        gradient_norm = clip_gradients(self._model.parameters(), config.max_gradient_norm)
        rate = learning_rate(config, self._steps_done, self._total_steps)
        self._steps_done += 1
        self._consecutive_skips = 0 if math.isfinite(gradient_norm) else self._consecutive_skips + 1
        if self._consecutive_skips == 0:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        return OptimizerStep(gradient_norm=gradient_norm, learning_rate=rate, consecutive_skips=self._consecutive_skips)

    def full_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainingBackend`. See `merged_weights`."""
        self._reshard()
        for name, tensor in merged_weights(self._model, whole, dtype):
            yield name.removeprefix("causal."), tensor

    def adapter_weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """See `TrainingBackend`."""
        self._reshard()
        return adapter_weights(self._model.causal, whole, dtype)

    def without_adapter(self) -> AbstractContextManager[None]:
        """See `TrainingBackend`."""
        return adapters_off(self._model)

    def state(self) -> dict[str, Any]:
        """See `TrainingBackend`."""
        kept: dict[str, Any] = {"parameters": {name: to_host(parameter) for name, parameter in self.parameters().items()}}
        if self._optimizer is not None:
            kept |= {
                "optimizer": optimizer_state(self._optimizer),
                "optimizer_config": self._optimizer_config.model_dump(mode="json"),
                "schedule": [self._steps_done, self._total_steps, self._consecutive_skips],
            }
        return kept

    def load_state(self, state: dict[str, Any]) -> None:
        """See `TrainingBackend`. The optimizer and its settings are those of the state, whatever `reset_optimizer` said before."""
        for name, parameter in self.parameters().items():
            local(parameter).copy_(state["parameters"][name])
        self._optimizer = None
        if "optimizer" in state:
            _, total_steps, _ = state["schedule"]
            self.reset_optimizer(OptimizerConfig.model_validate(state["optimizer_config"]), total_steps)
            assert self._optimizer is not None
            load_optimizer_state(self._optimizer, state["optimizer"])
            self._steps_done, self._total_steps, self._consecutive_skips = state["schedule"]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """See `TrainingBackend`."""
        self._reshard()
        return {name.removeprefix("causal."): parameter for name, parameter in self._model.named_parameters()}

    def _reshard(self) -> None:
        self._root.reshard()  # after a forward the root's own parameters stay whole, as plain tensors

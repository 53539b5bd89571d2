"""Tensor parallelism inside groups of neighbouring ranks (Shoeybi et al. 2019, arXiv:1909.08053), FSDP between the groups."""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedConfig

from engine.config import TrainingConfig
from engine.control.mesh import Mesh
from engine.reshard.layout import Sharding
from engine.training.build import decoder_layers
from engine.training.fsdp import FSDPBackend
from engine.training.scoring import ResponseModel

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
"""Linear layers whose outputs (heads, features) are divided over the ranks of a group."""
ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""Linear layers whose inputs are divided; their outputs are summed over the group."""
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms over each head by itself, with one weight for all heads (Qwen3)."""


class TensorParallelBackend(FSDPBackend):
    """Each layer is computed by a group of ranks, which work on the same rows. Embedding, norms and head are computed by every rank of it."""

    @classmethod
    def mesh(cls, config: TrainingConfig, ranks: int) -> Mesh:
        """See `TrainingBackend`."""
        size = config.tensor_parallel_ranks or ranks
        if ranks % size:
            raise ValueError(f"training.tensor_parallel_ranks={size} does not divide the {ranks} ranks of the pool; choose a divisor")
        return Mesh.grouped(ranks, size)

    def _arrange(self, model: ResponseModel, config: TrainingConfig, sharding: Sharding | None) -> DeviceMesh:
        # Its own way of dividing layers decides who holds what; another order of shards would not bring them nearer to a rollout's.
        ranks = dist.get_world_size()
        data = self.mesh(config, ranks).parts
        check_divisible(model, ranks // data)
        devices = init_device_mesh(self._device.type, (data, ranks // data), mesh_dim_names=("data", "tensor"))
        for layer in decoder_layers(model.causal):
            parallelize_module(layer.to(self._device), devices["tensor"], _plan(layer))
        self.data_group = devices.get_group("data")
        return devices["data"]


def _plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        # One input for several layers: their gradients for it are added up before they go over the wire, which happens once.
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
    }
    plan |= {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel() for name in ROWS}
    # Norms inside attention see this rank's heads, dimension 2 of [1, N, heads, D]; their one weight has a gradient from every rank.
    present = {name for name, _ in layer.named_modules()}
    return plan | {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in HEAD_NORMS if name in present}


def check_divisible(model: ResponseModel, size: int) -> None:
    """ValueError for a model that cannot be divided by `size`, or that is not made of the layers above."""
    config: PreTrainedConfig = model.causal.config
    for layer in decoder_layers(model.causal):
        modules = dict(layer.named_modules())
        weighted = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
        linear = {name for name in weighted if isinstance(modules[name], nn.Linear)}
        strange = (linear ^ {*COLUMNS, *ROWS}) | {name for name in weighted - linear if not _replicable(name, modules[name], config)}
        if strange:
            raise ValueError(
                f"training.backend=tensor_parallel does not know how to divide layers of model {config.model_type} "
                f"({', '.join(sorted(strange))}); set training.backend=fsdp"
            )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, key) % size:
            raise ValueError(f"training.tensor_parallel_ranks={size} does not divide the model's {key}, {getattr(config, key)}; choose a divisor")


def _replicable(name: str, module: nn.Module, config: PreTrainedConfig) -> bool:
    """Whether every rank can have this layer whole: a norm over the hidden state, or inside attention over one head."""
    inside = name.startswith("self_attn.")
    known = name in HEAD_NORMS if inside else name.endswith("norm")
    return known and all(not inside or weight.numel() == config.head_dim for weight in module.parameters())

"""Training backends by the names that `training.backend` uses. A new one is a new file and a line here, or `module:Class`."""

from typing import TYPE_CHECKING

from engine.registry import Registry

if TYPE_CHECKING:  # torch; listing names must not pay for it
    from engine.training.backend import TrainingBackend

BACKENDS: "Registry[type[TrainingBackend]]" = Registry(
    "training backend",
    {
        "fsdp": "engine.training.fsdp:FSDPBackend",
        "tensor_parallel": "engine.training.tensor_parallel:TensorParallelBackend",
    },
    methods=(
        "mesh",
        "extend",
        "load",
        "reset_optimizer",
        "score",
        "values",
        "optimizer_step",
        "parameters",
        "full_weights",
        "adapter_weights",
        "without_adapter",
        "state",
        "load_state",
    ),
)

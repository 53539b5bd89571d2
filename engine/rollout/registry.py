"""Rollout backends by the names that `rollout.backend` uses. A new one is a new file and a line here, or `module:Class`."""

from typing import TYPE_CHECKING

from engine.registry import Registry

if TYPE_CHECKING:  # torch; listing names must not pay for it
    from engine.rollout.backend import RolloutBackend

BACKENDS: "Registry[type[RolloutBackend]]" = Registry(
    "rollout backend",
    {
        "vllm": "engine.rollout.vllm:VLLMBackend",
        "transformers": "engine.rollout.transformers:TransformersBackend",
    },
    methods=("mesh", "extend", "stream", "wants", "receive", "load_adapter"),
)

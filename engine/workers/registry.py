"""Annotators by the names that `annotators.NAME.worker` uses. A new one is a new file and a line here, or `module:Class`."""

from typing import TYPE_CHECKING

from engine.registry import Registry

if TYPE_CHECKING:  # torch; listing names must not pay for it
    from engine.workers.base import Annotator

ANNOTATORS: "Registry[type[Annotator]]" = Registry(
    "annotator",
    {
        "reward_model": "engine.workers.reward_model:RewardModelWorker",
    },
    methods=("annotate", "annotations", "configuration", "load_prompts", "save_state", "load_state", "meshes"),
)

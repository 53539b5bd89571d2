"""A Ray cluster and the workers of all roles on it, kept alive across the stages of a recipe."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from transformers import AutoTokenizer

from engine.config import EngineConfig, RLStageConfig, SFTStageConfig
from engine.control.recorder import Recorder
from engine.control.resources import Pool, open_pools
from engine.control.worker_group import WorkerGroup
from engine.hardware import Device, resolve_dtype
from engine.prompts import Prompt
from engine.workers.actor import HybridActor
from engine.workers.critic import CriticWorker
from engine.workers.reference import ReferenceWorker
from engine.workers.registry import ANNOTATORS
from engine.workers.reward import RewardWorker

OBJECT_STORE_BYTES = 200 * 2**20
"""Only batches of tokens go through Ray's object store, never weights."""

ADAPTER = "adapter"

_ANY_DEVICE = {
    # One process holds vLLM's engine and the trainer, and threads are Ray's to give.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
WORKER_ENVIRONMENT: Mapping[Device, Mapping[str, str]] = {
    # vLLM compiles a few sampling helpers even in eager mode: 20 s of C++ compiler in every process, for nothing at a CPU's sizes.
    "cpu": _ANY_DEVICE | {"TORCHDYNAMO_DISABLE": "1"},
    "cuda": _ANY_DEVICE,
}


def import_path() -> dict[str, str]:
    """PYTHONPATH of this process for its workers, on nodes too whose Ray somebody else started; the working directory Ray passes on itself."""
    own = [os.path.abspath(directory) for directory in os.environ.get("PYTHONPATH", "").split(os.pathsep) if directory]
    # What the node had before stays behind it: Ray puts it in when it starts the worker.
    return {"PYTHONPATH": os.pathsep.join([*own, "${PYTHONPATH}"])} if own else {}


class ConfigurationMismatchError(RuntimeError):
    """A worker runs with another configuration than the controller's."""


class Session:
    """What training and evaluation run on: a worker group for each role, and what they have in common."""

    def __init__(self, config: EngineConfig, pools: Mapping[str, Pool], model_directory: Path, directory: Path) -> None:
        self.config, self.directory, self.recorder = config, directory, Recorder()
        self.tokenizer = AutoTokenizer.from_pretrained(model_directory)
        self._pools, self._model_directory = pools, model_directory
        self.actor = self._group("actor", HybridActor, max_context_tokens=config.max_context_tokens)
        self.reward = self._group("reward", RewardWorker)
        self.reference = self._group("reference", ReferenceWorker) if config.has_reference_role else None
        self.critic = self._group("critic", CriticWorker) if config.critic else None
        self.annotators = {
            name: self._group(name, ANNOTATORS.get(annotator.worker), name=name, **annotator.parameters)
            for name, annotator in config.annotators.items()
        }
        for group in self.groups:
            for rank, digest in enumerate(group.configuration().get()):
                if digest != config.digest():
                    message = f"{group.role} rank {rank} confirms configuration {digest}, the controller has {config.digest()}"
                    raise ConfigurationMismatchError(message)
        self.actor.tell_finished(self.reward.outlet("score_ahead")).get()
        self.actor.synchronise().get()
        self.actor.probe().get()

    @classmethod
    @contextmanager
    def open(cls, config: EngineConfig, model_directory: Path, directory: Path) -> Iterator["Session"]:
        """Starts Ray (or joins the cluster that RAY_ADDRESS names), the workers and their engines; takes everything down again.

        `model_directory` and `directory` must be visible from every node; logs go to `directory`/workers.
        Raises `ResourceError` when Ray lacks devices, `WorkerError` when a worker fails, `ConfigurationMismatchError` when one
        was given another configuration.
        """
        # Whatever fails is told by name where it is waited for; Ray would print it a second time for every call further down.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        started_here = not ray.is_initialized()
        if started_here:
            # Left to itself, Ray would join whatever cluster somebody has started on this machine.
            own = {"address": "local", "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
            ray.init(log_to_driver=False, configure_logging=False, **({} if os.environ.get("RAY_ADDRESS") else own))
        try:
            names = [config.resources.pool_of(role) for role in config.roles()]
            environment = {device: {**variables, **import_path()} for device, variables in WORKER_ENVIRONMENT.items()}
            with open_pools(config.resources, names, environment, directory / "workers") as pools:
                for pool in pools.values():
                    pool.connect(config.resources.call_deadline_seconds)
                yield cls(config, pools, model_directory, directory)
        finally:
            if started_here:
                ray.shutdown()

    @property
    def groups(self) -> list[WorkerGroup]:
        """All groups."""
        return [group for group in (self.actor, self.reward, self.reference, self.critic, *self.annotators.values()) if group is not None]

    def load_prompts(self, name: str, prompts: Sequence[Prompt]) -> None:
        """Gives the prompts to every role, under a name that plans and rollouts mention."""
        for future in [group.load_prompts(name, list(prompts)) for group in self.groups]:
            future.get()

    def begin_stage(self, config: SFTStageConfig | RLStageConfig) -> None:
        """A fresh optimizer for the policy; in RL the reference and the critic begin with the policy's weights as they are now."""
        self.actor.begin_stage(config).get()
        if config.kind == "sft":
            return
        self.reward.use(config.reward).get()
        wanted = ((self.reference, config.algorithm.kl), (self.critic, config.algorithm.critic))
        if followers := [group for group, settings in wanted if group is not None and settings is not None]:
            start = self.export(self.directory / "start")
            for future in [group.begin_stage(config, start) for group in followers]:
                future.get()

    def reset_reference(self, config: RLStageConfig) -> None:
        """The reference becomes the policy as it is now. ValueError with LoRA, where it is the base, which never changes."""
        if self.reference is None:
            raise ValueError("algorithm.kl.reset_reference_every_steps: there is no reference of its own to reset; leave training.lora out")
        self.reference.begin_stage(config, self.export(self.directory / "start")).get()

    def export(self, directory: Path) -> Path:
        """Writes the policy as an ordinary Hugging Face directory, whole or not at all. Returns it.

        With LoRA it is merged, and the adapter alone lies beside it, in a directory `adapter`.
        """
        self.actor.export(directory).get()
        if self.config.training.lora is not None:
            self.actor.export_adapter(directory.with_name(ADAPTER)).get()
        return directory

    def _group(self, role: str, worker_class: type, **parameters: Any) -> WorkerGroup:
        pool = self._pools[self.config.resources.pool_of(role)]
        arguments = {
            "config": self.config,
            "model_directory": self._model_directory,
            "device": pool.device,
            "dtype": resolve_dtype(pool.device, self.config.dtype),
            **parameters,
        }
        return WorkerGroup(role, worker_class, arguments, pool, self.config.resources.call_deadline_seconds, self.recorder)

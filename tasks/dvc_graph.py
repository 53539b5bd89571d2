"""The stages of a recipe as DVC sees them: what each is run by, and the settings, files and outputs of other stages that it depends on.

`params.yaml` holds every setting of the recipe, resolved; `dvc.yaml` is made from it. What a stage depends on there is what its fingerprint is made
from (`tasks/fingerprint.py`), so that DVC and a run agree on what is up to date.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from engine.atomic import atomic_file
from tasks import data, fingerprint, validate, workspace
from tasks.compose import load_resolved, write_resolved
from tasks.config import RecipeConfig
from tasks.config_data import DataConfig
from tasks.differences import leaves
from tasks.problems import ConfigurationError, Problem
from tasks.progress import BASE
from tasks.stage_config import GIVEN, REFERENCES, StageConfig, kind_of, references

PARAMS, GRAPH = "params.yaml", "dvc.yaml"
PREPARE, VALIDATE, REPORT = "prepare", "validate", "report"
EVALUATE = "evaluate-"
"""Begins the name of an evaluation's DVC stage; no stage of a recipe has a dash in its name."""
COMMAND = "python -m tasks.dvc_stage"
OUTPUT, METRICS, MODEL, STEPS, PLOTS, SCORED = "output", "metrics.json", "model", "steps.csv", "plots", "evaluation.json"
LOCKS = ("requirements/cpu.lock", "requirements/gpu.lock")
"""Versions of libraries count."""
RANKS = tuple(f"resources.{key}" for key in ("ranks", "device", "cpus_per_rank", "pools", "roles"))
ENGINE = ("seed", "model", "rollout", "training", "annotators", *RANKS)
"""Settings that all numbers of the engine depend on."""
CURVES = {
    "Reward": ("rl", "reward/mean"),
    "Response length": ("rl", "response/tokens_mean"),
    "Entropy of the policy": ("rl", "policy/entropy"),
    "Trainer against rollout": ("rl", "policy/kl_rollout"),
    "SFT loss": ("sft", "sft/loss"),
}
"""Plots by title: the kind of stage, and the metric over its steps."""
HEADER = f"""\
# Made by `almanac dvc` from {PARAMS}; `almanac dvc recipe=NAME [key=value ...]` writes both for another recipe. docs/dvc.md
"""


def params_file() -> Path:
    """Every setting of the recipe that DVC is about."""
    return workspace.checkout() / PARAMS


def graph_file() -> Path:
    """What DVC knows of it."""
    return workspace.checkout() / GRAPH


def results(recipe: str, unit: str) -> Path:
    """What is published of a DVC stage: its metrics, and beside them its output."""
    return workspace.root() / "results" / recipe / unit


def evaluation_unit(label: str) -> str:
    """DVC stage of the evaluation `label`: `base`, or the stage before it."""
    return f"{EVALUATE}{label}"


def units(config: RecipeConfig) -> list[str]:
    """All DVC stages of a recipe, in the order of a run."""
    checked = [] if config.data.quality == "off" else [VALIDATE]
    found = [PREPARE, *checked, evaluation_unit(BASE)]
    for name, stage in config.stages.items():
        found += [name, evaluation_unit(name)] if kind_of(stage).trains else [name]
    return [*found, REPORT]


def graph(config: RecipeConfig) -> dict[str, Any]:
    """The content of dvc.yaml.

    Raises:
        ConfigurationError: a stage of the recipe has a name that DVC needs for another.
    """
    if taken := {PREPARE, VALIDATE, REPORT} & set(config.stages):
        raise ConfigurationError([Problem(f"stages.{name}", "is the name of another stage of DVC's; call it otherwise") for name in sorted(taken)])
    stages = {PREPARE: _prepare(config)}
    if config.data.quality != "off":
        stages[VALIDATE] = _validate(config)
    stages[evaluation_unit(BASE)] = _evaluation(config, BASE, None)
    weights: str | None = None
    for name, stage in config.stages.items():
        stages[name] = _stage(config, name, weights)
        if kind_of(stage).trains:
            weights = name
            stages[evaluation_unit(name)] = _evaluation(config, name, weights)
    stages[REPORT] = _report(config)
    return {"stages": stages, "plots": _plots(config)}


def text(config: RecipeConfig) -> str:
    """dvc.yaml as it should be."""
    return HEADER + yaml.safe_dump(graph(config), sort_keys=False, width=140)


def read_params() -> RecipeConfig:
    """The recipe that DVC is about.

    Raises:
        ConfigurationError: params.yaml is not there, or is no valid configuration; names the keys.
    """
    if not params_file().is_file():
        raise ConfigurationError([Problem("", f"there is no {params_file()}; `almanac dvc recipe=NAME` writes it")])
    return load_resolved(params_file())


def write(config: RecipeConfig) -> list[Path]:
    """Writes params.yaml and dvc.yaml for a recipe. Returns those that have changed."""
    content, before = text(config), {path: path.read_bytes() if path.is_file() else b"" for path in (params_file(), graph_file())}
    write_resolved(config, params_file())
    with atomic_file(graph_file()) as file:
        file.write_text(content, encoding="utf-8")
    return [path for path, old in before.items() if path.read_bytes() != old]


def differences(config: RecipeConfig) -> list[str]:
    """In which keys params.yaml, and in which stages dvc.yaml, are not what this recipe makes them; a line each."""
    ours, theirs = (dict(leaves(one.model_dump(mode="json"))) for one in (config, read_params()))
    keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    found = [f"{PARAMS}: {key} is {theirs.get(key)}, and {ours.get(key)} in the recipe" for key in keys]
    if not graph_file().is_file() or graph_file().read_text(encoding="utf-8") != text(config):
        found.append(f"{GRAPH}: {', '.join(behind(config)) or 'what is beside the stages'}")
    return found


def behind(config: RecipeConfig) -> list[str]:
    """DVC stages that dvc.yaml does not hold as they should be for this recipe; those that are there of another one are not counted."""
    try:
        there = yaml.safe_load(graph_file().read_text(encoding="utf-8"))["stages"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        there = {}
    return [name for name, stage in graph(config)["stages"].items() if there.get(name) != stage]


def _unit(name: str, deps: Iterable[str], params: Iterable[str], outs: Sequence[str], metrics: Sequence[str] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {"cmd": f"{COMMAND} {name}", "deps": sorted(set(deps)), "params": list(dict.fromkeys(params)), "outs": list(outs)}
    if metrics:
        # Small, and told apart line by line: git keeps them.
        found["metrics"] = [{path: {"cache": False}} for path in metrics]
    return found


def _result(config: RecipeConfig, unit: str, *parts: str) -> str:
    return Path("results", config.name, unit, *parts).as_posix()


def _published(config: RecipeConfig, unit: str, deps: Iterable[str], params: Iterable[str]) -> dict[str, Any]:
    return _unit(unit, deps, params, [_result(config, unit, OUTPUT)], [_result(config, unit, METRICS)])


def _prepare(config: RecipeConfig) -> dict[str, Any]:
    files = [file for name in ("train", "validation", "test", "sft") if (file := getattr(config.data, f"{name}_file"))]
    # Of the model only its tokenizer counts, but that is known when the model is there.
    params = ["seed", "model.architecture", "model.path", "model.gguf", *_data_keys(), *_caps(config)]
    return _unit(PREPARE, [*data.CODE, *LOCKS, *files, *_own_model(config)], params, [f"data/{config.name}"])


def _validate(config: RecipeConfig) -> dict[str, Any]:
    rewards = ["evaluation_reward", *(f"stages.{name}.reward" for name in config.generating_stages())]
    own = _own_sources([config.evaluation_reward, *(stage.reward for stage in config.generating_stages().values())])
    deps = [f"data/{config.name}", *validate.CODE, *LOCKS, *own, *config.data.checks.evaluation_files]
    return _published(config, VALIDATE, deps, ["data.quality", "data.checks", *rewards, *_caps(config)])


def _stage(config: RecipeConfig, name: str, weights: str | None) -> dict[str, Any]:
    stage = config.stages[name]
    kind = kind_of(stage)
    deps = [*kind.code, *_own_sources([stage]), *_inputs(config, stage)]
    if config.data.quality != "off" and fingerprint.reads_split(stage) is not None:
        # Nothing is trained on data that are not fit.
        deps.append(_result(config, VALIDATE, METRICS))
    if kind.engine:
        deps += _engine(config, weights)
    return _published(config, name, deps, [f"stages.{name}", *(ENGINE if kind.engine else [])])


def _evaluation(config: RecipeConfig, label: str, weights: str | None) -> dict[str, Any]:
    own = _own_sources([config.evaluation, config.evaluation_reward])
    deps = [f"data/{config.name}/test.parquet", "tasks/accuracy.py", *own, *_engine(config, weights)]
    return _published(config, evaluation_unit(label), deps, ["evaluation", "evaluation_reward", *ENGINE])


def _report(config: RecipeConfig) -> dict[str, Any]:
    deps = [_result(config, unit, OUTPUT, SCORED) for unit in units(config) if unit.startswith(EVALUATE)]
    params = ["seed", "evaluation.bootstrap_resamples", "evaluation.confidence"]
    return _published(config, REPORT, [*deps, "tasks/accuracy.py", "tasks/plots.py"], params)


def _engine(config: RecipeConfig, weights: str | None) -> list[str]:
    """What all numbers of the engine depend on, beside settings: its source, libraries, and the weights that the stage `weights` has left."""
    first = _own_model(config) if weights is None else [_result(config, weights, OUTPUT, MODEL)]
    return ["engine", *LOCKS, *first, *_own_sources([config.rollout, config.training, *config.annotators.values()])]


def _inputs(config: RecipeConfig, stage: StageConfig) -> list[str]:
    split = fingerprint.reads_split(stage)
    taken = [_result(config, other, OUTPUT, GIVEN[REFERENCES[setting]]) for setting, other in references(stage)]
    return taken if split is None else [f"data/{config.name}/{split}.parquet", *taken]


def _data_keys() -> list[str]:
    """Settings that the rows depend on."""
    asked = ("quality", "checks")
    return [f"data.{name}" for name in DataConfig.model_fields if name not in asked]


def _caps(config: RecipeConfig) -> list[str]:
    """Settings that say which prompts are too long."""
    generating = [f"stages.{name}.max_prompt_tokens" for name in config.generating_stages()]
    return generating or [f"stages.{name}.max_tokens" for name, stage in config.stages.items() if stage.kind == "sft"]


def _own_model(config: RecipeConfig) -> list[str]:
    path = config.model.path
    return [path] if path is not None and (workspace.root() / path).is_dir() else []


def _own_sources(settings: Iterable[Any]) -> list[str]:
    """Source files of functions of one's own, relative where they lie in the project."""
    sources = fingerprint.own_sources([part.model_dump(mode="json") for part in settings]).values()
    return [os.path.relpath(path, workspace.root()) if path.is_relative_to(workspace.root()) else str(path) for path in sources]


def _plots(config: RecipeConfig) -> list[dict[str, Any] | str]:
    """Curves over steps, and pictures."""
    found: list[dict[str, Any] | str] = []
    for title, (kind, metric) in CURVES.items():
        files = [_result(config, name, OUTPUT, STEPS) for name, stage in config.stages.items() if stage.kind == kind]
        if files:
            found.append({title: {"x": "step", "y": dict.fromkeys(files, metric), "x_label": "step", "y_label": metric, "template": "linear"}})
    pictures = [_result(config, name, OUTPUT, PLOTS) for name, stage in config.stages.items() if kind_of(stage).trains]
    pictures += [_result(config, name, OUTPUT, "histogram.png") for name, stage in config.stages.items() if stage.kind == "difficulty"]
    return [*found, *pictures, _result(config, REPORT, OUTPUT, PLOTS)]

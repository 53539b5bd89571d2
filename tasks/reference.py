"""References: how the curves of a recipe come out when nothing is wrong, from runs with several seeds. One JSON file each, in `conf/reference/`."""

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from tasks import curves, journal, workspace
from tasks.check import did_you_mean
from tasks.comparison import LEAST_SEEDS
from tasks.config import RecipeConfig
from tasks.curves import Series
from tasks.problems import ConfigurationError, Problem
from tasks.record import RunRecord

DIGITS = 6
"""Significant ones that are kept."""


class Stored(BaseModel):
    """Base of a reference's parts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="strings")


class MetricReference(Stored):
    """One curve of one stage."""

    mean: list[float]
    """Over the runs, of each window; NaN of one that no run has."""
    spread: list[float]
    """Standard deviation between runs, with n - 1."""
    n: list[int]
    """Runs that have the window."""
    runs: list[Series]
    """Each run's, in the order of `seeds`."""

    @classmethod
    def of(cls, runs: Sequence[Series]) -> Self:
        """From the same metric of all runs."""
        windows = np.asarray([run.windows for run in runs])
        there = np.isfinite(windows)
        n, kept = there.sum(axis=0), np.where(there, windows, 0.0)
        mean = np.where(n > 0, kept.sum(axis=0) / np.maximum(n, 1), math.nan)
        squares = np.where(there, (kept - mean) ** 2, 0.0).sum(axis=0)
        spread = np.where(n > 1, np.sqrt(squares / np.maximum(n - 1, 1)), math.nan)
        return cls(mean=[_rounded(v) for v in mean], spread=[_rounded(v) for v in spread], n=n.tolist(), runs=list(runs))


class StageReference(Stored):
    """One stage, or `base`, the weights that the recipe starts from."""

    steps: int
    """Planned. Windows are consecutive steps, as `numpy.array_split` divides them."""
    metrics: dict[str, MetricReference]
    seconds_by_phase: dict[str, float] = {}
    """Mean over the runs, of the whole stage."""


class Reference(Stored):
    """How a recipe comes out."""

    name: str
    """That of the configuration and of the file."""
    recipe: str
    overrides: list[str]
    """Settings that the runs had beside the recipe's own; a night has them too."""
    configuration_hash: str
    """SHA-256 of the resolved configuration with seed 0."""
    commit: str | None
    """Of the code that ran."""
    uncommitted: bool | None
    """Whether it differed from the commit."""
    date: str
    """ISO 8601, UTC."""
    lock_digest: str | None
    """SHA-256 of the package lock file."""
    hardware: dict[str, Any]
    seeds: list[int]
    runs: list[str]
    """Their ids."""
    seconds: float
    """Of a run from its first to its last record, mean."""
    stages: dict[str, StageReference]

    def series(self) -> dict[str, dict[str, list[Series]]]:
        """By stage and metric, a series for each run: what `comparison.compare` takes."""
        return {name: {metric: found.runs for metric, found in stage.metrics.items()} for name, stage in self.stages.items()}


def configuration_hash(config: RecipeConfig) -> str:
    """SHA-256 of the resolved configuration without its seed: what a reference is for."""
    return config.model_copy(update={"seed": 0}).digest()


def build(config: RecipeConfig, recipe: str, overrides: Sequence[str], runs: Sequence[RunRecord]) -> Reference:
    """From finished runs of one configuration.

    Args:
        config: theirs, with any seed.
        recipe: file in conf/recipe.
        overrides: beside it, without a seed.
        runs: records; their event logs are read.

    Raises:
        ValueError: too few runs.
    """
    if len(runs) < LEAST_SEEDS:
        raise ValueError(f"{len(runs)} seeds are too few for a reference: the spread between them would not be known; give at least {LEAST_SEEDS}")
    found = [curves.curves(journal.read_events(workspace.run_directory(run.run) / "events.jsonl")) for run in runs]
    summaries = [curves.summary(stages) for stages in found]
    stages = {}
    for name, first in found[0].items():
        metrics = {metric: _of_all(summaries, name, metric) for metric in summaries[0][name]}
        kept = {metric: MetricReference.of(series) for metric, series in metrics.items() if len(series) == len(runs)}
        stages[name] = StageReference(steps=first.steps, metrics=kept, seconds_by_phase=_mean_seconds(runs, name))
    lineage = runs[0].lineage
    return Reference(
        name=config.name,
        recipe=recipe,
        overrides=list(overrides),
        configuration_hash=configuration_hash(config),
        commit=lineage.commit,
        uncommitted=any(run.lineage.uncommitted for run in runs),
        date=max(run.finished or run.started for run in runs),
        lock_digest=lineage.lock_digest,
        hardware=lineage.hardware,
        seeds=[run.seed for run in runs],
        runs=[run.run for run in runs],
        seconds=_rounded(float(np.mean([seconds(run) for run in runs]))),
        stages=stages,
    )


def seconds(run: RunRecord) -> float:
    """Wall clock from a run's first record to its end; NaN of one that has none."""
    return math.nan if run.finished is None else (datetime.fromisoformat(run.finished) - datetime.fromisoformat(run.started)).total_seconds()


def _of_all(summaries: Sequence[curves.Summary], stage: str, metric: str) -> list[Series]:
    """A metric of the runs that have it with the same number of windows as the first one, rounded."""
    found = [summary[stage][metric] for summary in summaries if metric in summary.get(stage, {})]
    alike = [series for series in found if len(series.windows) == len(found[0].windows)]
    return [Series(windows=[_rounded(value) for value in series.windows], noise=_rounded(series.noise)) for series in alike]


def _mean_seconds(runs: Sequence[RunRecord], name: str) -> dict[str, float]:
    records = [stage.seconds_by_phase for run in runs for stage in run.stages if stage.name == name]
    phases = {phase for record in records for phase in record}
    return {phase: _rounded(float(np.mean([record.get(phase, 0.0) for record in records]))) for phase in sorted(phases)}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def file(name: str) -> Path:
    """Where the reference `name` is written: `conf/reference` under the project's root."""
    return workspace.root() / "conf" / "reference" / f"{name}.json"


def known() -> dict[str, Path]:
    """All references by name: those under the project's root, and before them those of the checkout."""
    directories = [workspace.conf_directory() / "reference", file("any").parent]
    return {path.stem: path for directory in directories for path in sorted(directory.glob("*.json"))}


def write(reference: Reference) -> Path:
    """Writes or replaces the file; a reader sees the old one or the new one."""
    path = file(reference.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(reference.model_dump_json(indent=1) + "\n")
    beside.replace(path)
    return path


def load(name: str) -> Reference:
    """The reference `name`.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    found = known()
    if name not in found:
        there_are = f"there are: {', '.join(found)}" if found else "there is none yet: `almanac reference make RECIPE` makes one"
        raise ValueError(f"there is no reference {name}{did_you_mean(name, list(found))}; {there_are}")
    try:
        return Reference.model_validate_json(found[name].read_text())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{found[name]}: not a reference this version can read: {where}: {first['msg']}; make it anew") from error


def check(reference: Reference, config: RecipeConfig) -> None:
    """Raises ConfigurationError where the reference is one of another configuration than `config`."""
    now = configuration_hash(config)
    if now != reference.configuration_hash:
        command = " ".join(["almanac reference make", reference.recipe, *reference.overrides])
        text = (
            f"the reference of {reference.date} was made with configuration {reference.configuration_hash[:16]}, and the recipe is now {now[:16]}; "
            f"put the recipe back, or make the reference anew: {command}"
        )
        raise ConfigurationError([Problem(reference.name, text)])


def digest(reference: Reference) -> str:
    """SHA-256 of the reference's content: nights that were compared with another one are not comparable."""
    return hashlib.sha256(reference.model_dump_json().encode()).hexdigest()


def reusable(records: Mapping[str, RunRecord], config: RecipeConfig, commit: str | None) -> RunRecord | None:
    """The newest of the records, by id, that is a finished run of just this configuration, seed included, by the code of just this commit."""
    for run in records.values():
        if run.status == "finished" and run.lineage.configuration_digest == config.digest() and run.lineage.commit == commit:
            return run
    return None

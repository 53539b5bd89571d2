"""What DVC sees of a run: outputs of its stages and evaluations, and their metrics, under `results/RECIPE/`; and `dvc.lock`, which says so.

An output is published as it is, by hard links where the file system has them. So whoever made it, a run or `dvc repro`, and however often it is taken
again, the same bytes are published, and `dvc status` is clean after either.
"""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.atomic import atomic_directory, atomic_file
from engine.statistics import paired_gain_interval
from engine.trainer.evaluation import Evaluation
from tasks import dvc_graph, page, plots, workspace
from tasks.accuracy import Accuracy, accuracy
from tasks.config import RecipeConfig
from tasks.curves import OF_THE_MACHINE
from tasks.dvc_graph import CURVES, METRICS, PLOTS, PREPARE, REPORT, SCORED, VALIDATE, evaluation_unit
from tasks.failure import reason
from tasks.outputs import OUTPUT, Output, Place
from tasks.progress import BASE, Listener, Notice
from tasks.stage_config import kind_of
from tasks.validate import Validation

COMMIT_SECONDS = 600.0
"""DVC hashes what is new, and copies it where it cannot link it."""


class Publication:
    """Publishes what a run makes or takes again, where the run is of the very recipe that `params.yaml` holds; else does nothing.

    A context manager: leaving it waits for `dvc.lock`, which `close` has begun. What goes wrong is told to the listener and costs the run nothing. No
    dataclass, and with slots: see `RunContext`.
    """

    __slots__ = ("_commit", "_config", "_done", "_listener", "_only", "_wanted")

    def __init__(self, config: RecipeConfig, listener: Listener) -> None:
        self._config, self._listener = config, listener
        self._done: list[str] = []
        self._commit: Commit | None = None
        # Set by DVC to the stage that it is running: the outputs of others are not to be touched, and it writes dvc.lock itself.
        running = os.environ.get("DVC_STAGE")
        self._only = None if running is None else running.rpartition(":")[2]
        self._wanted = False
        with self._complaining():
            self._wanted = is_about(config)
            if self._wanted and (behind := dvc_graph.behind(config)):
                self._wanted = False
                raise ValueError(f"dvc.yaml is not what params.yaml makes it ({', '.join(behind)}); run `almanac dvc`")

    def data(self) -> None:
        """The splits lie in `data/`."""
        if self._wanted:
            self._done.append(PREPARE)

    def validation(self, found: Validation) -> None:
        """The verdict on the data."""
        self._publish(VALIDATE, found.directory, lambda: {"failed": len(found.problems)})

    def stage(self, name: str, directory: Path) -> None:
        """What a stage has left, complete."""
        self._publish(name, directory, lambda: stage_metrics(_output(directory)))

    def evaluation(self, label: str, directory: Path, found: Accuracy) -> None:
        """The scores of an evaluation, complete."""
        metrics = {name: value for name, value in found.metrics().items() if name.startswith("accuracy/")}
        self._publish(evaluation_unit(label), directory, lambda: metrics)

    def lay_out(self, unit: str, place: Place) -> None:
        """Where an output is missing and the published one is the same, as after `dvc pull` or `dvc checkout`, takes that."""
        published = dvc_graph.results(self._config.name, unit) / dvc_graph.OUTPUT
        if not self._wanted or (place.directory / OUTPUT).exists():
            return
        with suppress(OSError, ValueError):
            if _output(published).fingerprint == place.fingerprint:
                with place.making(keep=False) as directory:
                    # Its files are hashed when it is found; what says that it is complete comes last.
                    _link(published, directory, but=OUTPUT)
                    _link_file(published / OUTPUT, directory / OUTPUT)

    def close(self) -> None:
        """The report, where everything else is there; `dvc.lock` is begun, in a process beside."""
        if not self._wanted:
            return
        if set(self._done) >= {unit for unit in dvc_graph.units(self._config) if unit != REPORT}:
            self.report()
        if self._done and self._only is None:
            with self._complaining():
                self._commit = Commit(self._done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._commit is not None:
            with self._complaining():
                self._commit.wait()

    def report(self) -> None:
        """Accuracies before and after the stages, and pictures of them, by what is published of the evaluations."""
        evaluations: dict[str, Evaluation] = {}
        with self._complaining():
            for label in labels(self._config):
                path = dvc_graph.results(self._config.name, evaluation_unit(label)) / dvc_graph.OUTPUT / SCORED
                evaluations[label] = Evaluation(**{**json.loads(path.read_text()), "label": label})
            accuracies = {label: accuracy(found, self._config.evaluation, self._config.seed) for label, found in evaluations.items()}
            unit = dvc_graph.results(self._config.name, REPORT)
            _write_metrics(unit / METRICS, gains(evaluations, accuracies, self._config))
            with page.drawing("DVC: the report", lambda text: self._listener(Notice(text=text))):
                with atomic_directory(unit / dvc_graph.OUTPUT) as fresh:
                    plots.save(plots.accuracy_figure(accuracies), fresh / PLOTS / "accuracy.png")
                    plots.save(plots.difficulty_figure(accuracies), fresh / PLOTS / "accuracy_by_difficulty.png")
                self._done.append(REPORT)

    def done(self, unit: str) -> bool:
        """Whether the DVC stage has been published."""
        return unit in self._done

    def _publish(self, unit: str, source: Path, metrics: Callable[[], Mapping[str, Any]]) -> None:
        if not self._wanted or self._only not in (None, unit):
            return
        with self._complaining():
            target = dvc_graph.results(self._config.name, unit)
            if not _same(source, target / dvc_graph.OUTPUT):
                with atomic_directory(target / dvc_graph.OUTPUT) as fresh:
                    _link(source, fresh)
            _write_metrics(target / METRICS, metrics())
            self._done.append(unit)

    @contextmanager
    def _complaining(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
            self._listener(Notice(text=f"DVC: {reason(error)}"))


def is_about(config: RecipeConfig) -> bool:
    """Whether DVC's files are about this very recipe: the checkout is the root, DVC is set up there, and params.yaml holds the same settings.

    Raises:
        ConfigurationError: params.yaml is no valid configuration; names the keys.
    """
    root = workspace.root()
    if root != workspace.checkout() or not (root / ".dvc").is_dir() or not dvc_graph.params_file().is_file():
        return False
    return dvc_graph.read_params().digest() == config.digest()


class Commit:
    """`dvc commit`, begun: writes into dvc.lock that what lies there was made from what lies there, and puts it into the cache."""

    def __init__(self, units: Sequence[str]) -> None:
        command = [sys.executable, "-m", "dvc", "commit", "--quiet", "--force", *units]
        self._process = subprocess.Popen(command, cwd=workspace.root(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def wait(self) -> None:
        """Returns when it is done.

        Raises:
            ValueError: DVC refuses; says why.
            subprocess.TimeoutExpired: it takes too long.
        """
        with self._process as process:
            try:
                said, _ = process.communicate(timeout=COMMIT_SECONDS)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise ValueError(f"dvc.lock was not brought up to date; `dvc commit` says: {' '.join(said.split())}")


def labels(config: RecipeConfig) -> list[str]:
    """All evaluations of a recipe, in order."""
    return [BASE, *(name for name, stage in config.stages.items() if kind_of(stage).trains)]


def stage_metrics(made: Output) -> dict[str, float]:
    """Of a stage: its steps, the metrics of the last one that are drawn as curves, and what it found."""
    assert made.record is not None
    last = {name: made.metrics[name] for _, name in CURVES.values() if name in made.metrics}
    return {"steps": made.record.steps, **last, **made.record.results}


def gains(evaluations: Mapping[str, Evaluation], accuracies: Mapping[str, Accuracy], config: RecipeConfig) -> dict[str, dict[str, float]]:
    """By evaluation, in their order: accuracy, and what the stage before it has gained, with the interval over prompts. Fractions of 1."""
    found: dict[str, dict[str, float]] = {}
    settings, before = config.evaluation, None
    for label, after in evaluations.items():
        found[label] = {"accuracy": accuracies[label].average.mean, "greedy": accuracies[label].greedy.mean}
        if before is not None:
            gain = paired_gain_interval(before.samples, after.samples, settings.bootstrap_resamples, settings.confidence, config.seed)
            found[label] |= {"gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high}
        before = after
    return found


def write_steps(path: Path, steps: Mapping[int, Mapping[str, float]]) -> None:
    """A row for each step, a column for each metric; without those of the machine, and empty where a step has no finite value."""
    names = sorted({name for metrics in steps.values() for name in metrics if not name.startswith(OF_THE_MACHINE)})
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *names])
        for step, metrics in sorted(steps.items()):
            values = [metrics.get(name, math.nan) for name in names]
            writer.writerow([step, *(value if math.isfinite(value) else "" for value in values)])


def _output(directory: Path) -> Output:
    return Output.model_validate_json((directory / OUTPUT).read_bytes())


def _write_metrics(path: Path, metrics: Mapping[str, Any]) -> None:
    with atomic_file(path) as file:
        file.write_text(json.dumps(metrics, indent=2) + "\n")


def _files(directory: Path) -> dict[str, int]:
    """Size of each file below."""
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in directory.rglob("*") if path.is_file()}


def _same(source: Path, target: Path) -> bool:
    """Whether a directory has been published already: then it stays, and DVC need not hash it again."""
    if not target.is_dir() or _files(source) != _files(target):
        return False
    said = [name for name in (OUTPUT, "summary.json") if (source / name).is_file()]
    return all((source / name).read_bytes() == (target / name).read_bytes() for name in said)


def _link(source: Path, target: Path, but: str = "") -> None:
    shutil.copytree(source, target, copy_function=_link_file, dirs_exist_ok=True, ignore=shutil.ignore_patterns(but))


def _link_file(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)

"""What Prefect's pages show beside a run's log: a table for each stage, the way to MLflow, progress, and the verdict of a night."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.exceptions import PrefectException

from engine.events import EvaluationProgressed, StageFinished, StageStarted, StepFinished
from tasks import show
from tasks.nights import NightRecord
from tasks.progress import Listener, Report, evaluation_phase
from tasks.record import RunRecord, StageRecord
from tasks.tracker_location import tracking_uri

logger = logging.getLogger(__name__)

SECONDS_BETWEEN = 15.0
"""Each sign of progress is a request to Prefect's server and a row in its database."""
MLFLOW_PAGES = "ALMANAC_MLFLOW_PAGES"
"""Environment variable: where MLflow's pages are, where runs write to its database and not to a tracking server. `almanac up` sets it."""

UNITS = "accuracies and gain in %, with their intervals"
"""What the columns of a table do not say themselves."""


@contextmanager
def best_effort() -> Iterator[None]:
    """Nothing is lost where Prefect does not take what only its pages show: the block's errors are logged."""
    try:
        yield
    except (PrefectException, httpx.HTTPError, OSError, RuntimeError) as error:
        logger.warning("Prefect's pages lack something: %s", error)


def key(*parts: str) -> str:
    """Of an artifact: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def stage_row(record: RunRecord, stage: StageRecord) -> dict[str, Any]:
    """What a person asks of a stage: accuracies and gain in % with their intervals, wall-clock seconds."""
    found: dict[str, Any] = {"stage": stage.name, "kind": stage.kind}
    if stage.steps_planned or stage.steps:
        found["steps"] = f"{stage.steps} of {stage.steps_planned or '?'}"
    if stage.accuracy_after is not None:
        found["accuracy before"] = show.percent(stage.accuracy_before, stage.interval_before)
        found["accuracy after"] = show.percent(stage.accuracy_after, stage.interval)
        found["gain"] = show.gain(stage)
    if stage.seconds is not None:
        found["seconds"] = round(stage.seconds, 1)
    found |= stage.results
    return found | {"run": record.run, "made by": stage.reused_from or record.run, "output": stage.output or ""}


def stage_table(record: RunRecord, name: str) -> None:
    """A stage that has ended, with a row; Prefect keeps those of earlier runs under the same key."""
    text = f"stage {name} of {record.recipe}; {UNITS}"
    with best_effort():
        create_table_artifact([stage_row(record, record.stage(name))], key=key(record.recipe, name), description=text)


def link(record: RunRecord) -> None:
    """The way from the flow run to the run in MLflow."""
    text = f"run {record.run} in MLflow"
    uri = record.mlflow.tracking_uri if record.mlflow is not None else tracking_uri()
    base = uri if uri.startswith(("http://", "https://")) else os.environ.get(MLFLOW_PAGES)
    with best_effort():
        if base:
            create_link_artifact(show.run_url(base, record), text, key=key(record.recipe, "mlflow"), description=text)
        else:
            create_markdown_artifact(f"{text}: `almanac ui {record.run}`", key=key(record.recipe, "mlflow"), description=text)


def night_markdown(record: NightRecord, page: str) -> str:
    """The verdict of a night: a line for each recipe, and each metric that is worse."""
    lines = [f"# Night {record.night}: {'something is worse' if record.worse else 'nothing is worse'}", ""]
    lines += ["| recipe | verdict | run | what |", "| --- | --- | --- | --- |"]
    for recipe in record.recipes:
        what = "; ".join(recipe.why()).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {recipe.name} | {recipe.word} | {recipe.how} | {what} |")
    return "\n".join([*lines, "", f"Page with all curves: `{page}`"])


def night_verdict(record: NightRecord, page: str) -> None:
    """The night, as a page of Prefect's."""
    with best_effort():
        create_markdown_artifact(night_markdown(record, page), key="night", description=f"night {record.night}")


class Bars:
    """Progress bars on Prefect's pages, by phase of a run of `recipe`."""

    def __init__(self, recipe: str) -> None:
        self._recipe = recipe
        self._made: dict[str, UUID] = {}

    def __call__(self, phase: str, percent: float) -> None:
        """Moves the bar of a phase, which is made where there is none."""
        with best_effort():
            if phase in self._made:
                update_progress_artifact(self._made[phase], progress=percent)
            else:
                made = create_progress_artifact(percent, key=key(self._recipe, "progress", phase), description=f"{phase} of {self._recipe}")
                assert isinstance(made, UUID)
                self._made[phase] = made


class Progress:
    """A listener between the run and who listens: long stages and evaluations have a bar, moved now and then.

    Args:
        listener: is told everything.
        draw: takes a phase and a percentage.
        clock: gives seconds.
    """

    def __init__(self, listener: Listener, draw: Callable[[str, float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._listener, self._draw, self._clock = listener, draw, clock
        self._steps: dict[str, int] = {}
        self._drawn: set[str] = set()
        self._last = clock()

    def __call__(self, event: Report) -> None:
        """Tells the listener first."""
        self._listener(event)
        match event:
            case StageStarted(stage=stage, steps=steps):
                self._steps[stage] = steps
            case StepFinished(stage=stage, step=step) if self._steps.get(stage):
                self._move(stage, 100.0 * step / self._steps[stage])
            case EvaluationProgressed(label=label, done=done, total=total) if total:
                self._move(evaluation_phase(label), 100.0 * done / total)
            case StageFinished(stage=stage):
                self._move(stage, 100.0)

    def _move(self, phase: str, percent: float) -> None:
        """The end is always shown of what was shown at all."""
        if self._clock() - self._last >= SECONDS_BETWEEN or (percent >= 100 and phase in self._drawn):
            self._last = self._clock()
            self._drawn.add(phase)
            self._draw(phase, percent)

"""The run's records: every event goes to a local file first, and from there to MLflow, soon or when MLflow is back."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from engine.control.trace import Trace
from engine.events import Event, SamplesGenerated, StageFinished, StepFinished, StepTraced
from tasks import journal, page, plots, run_report, show, traces, workspace
from tasks.accuracy import Accuracy, accuracy
from tasks.config import RecipeConfig
from tasks.data_error import DataError
from tasks.delivery import Delivery
from tasks.failure import reason
from tasks.journal import BaseModelUsed, DatasetUsed, EvaluationFinished, FileSaved, LoggedEvent, ModelSaved, RunFinished, RunStarted, StageReused
from tasks.mlflow_writer import MLflowWriter
from tasks.outcomes import Outcome
from tasks.record import RunRecord
from tasks.schemas import METRICS, ROLLOUTS, check
from tasks.stage_config import kind_of
from tasks.tracker_location import check_writable, experiment_name, tracking_uri

if TYPE_CHECKING:  # it imports torch
    from engine.trainer.evaluation import Evaluation

logger = logging.getLogger(__name__)


class Tracker:
    """Context manager around a run: `tracker.emit` is handed to the engine, the other methods are called by the tasks.

    MLflow shows the run as FINISHED when the block ends, as FAILED when it raises. `record` is read then: whoever changes a copy of it
    sets `tracker.record`. Methods may be called from any thread.

    Raises, when it is entered:
        OSError: the local database or artifacts cannot be written.
        ValueError: MLflow answers, but refuses the run, as when its experiment was deleted.

    What cannot be drawn at the end is said, and costs the run nothing.
    """

    def __init__(self, config: RecipeConfig, record: RunRecord) -> None:
        self.config = config
        self.record = record
        self.events_file = workspace.run_directory(record.run) / "events.jsonl"
        self._delivery = Delivery(self.events_file, MLflowWriter(tracking_uri(), experiment_name(config)))
        self._lock = threading.Lock()
        self._undrawn: list[str] = []
        self._trained_steps = 0
        self._newest_trace: Trace | None = None
        self._monitor: Any = None

    def __enter__(self) -> Self:
        check_writable()
        # MLflow's own patience, four minutes a call, would be the run's.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        # A line with the run's address on stdout, in the middle of the progress display.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        self.events_file.parent.mkdir(parents=True, exist_ok=True)
        lineage = self.record.lineage
        tags = {
            "almanac.run": self.record.run,
            "almanac.recipe": self.record.recipe,
            "almanac.seed": str(self.record.seed),
            "almanac.configuration_digest": lineage.configuration_digest,
            "almanac.process": self.record.process.model_dump_json(),
            "mlflow.source.name": "almanac",
        }
        if self.record.flow_run:
            tags["prefect.flow_run_id"] = self.record.flow_run
        if lineage.commit:
            tags |= {"mlflow.source.git.commit": lineage.commit, "git.uncommitted": str(bool(lineage.uncommitted)).lower()}
        self._log(
            RunStarted(
                run=self.record.run,
                recipe=self.record.recipe,
                description=self.config.description,
                configuration=self.config.model_dump(mode="json"),
                lineage=lineage.model_dump(mode="json"),
                tags=tags,
            )
        )
        self._delivery.begin()
        self.record.mlflow = self._delivery.reference
        if self.record.mlflow is not None and self.config.tracking.system_metrics:
            self._monitor = SystemMetricsMonitor(self.record.mlflow.run_id, tracking_uri=self.record.mlflow.tracking_uri)
            self._monitor.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._monitor is not None:
            self._monitor.finish()
        why = None if error is None else reason(error)
        with page.drawing("the run's pictures and page", self._undrawn.append):
            self._draw(plots.run_figures(journal.read_events(self.events_file)), None)
            self._report("failed" if why else "finished", why)
        summary = show.summary(self.record) | {"status": "failed" if why else "finished", "error": why}
        self._log(
            RunFinished(
                status="FAILED" if why else "FINISHED",
                reason=why,
                summary=summary,
                lineage=self.record.lineage.model_dump(mode="json"),
                note=show.note(self.record, self.config.description),
            )
        )
        self._delivery.end()
        self.record.mlflow = self._delivery.reference
        if self.complaint is not None:
            logger.warning(self.complaint)

    @property
    def complaint(self) -> str | None:
        """What people should know, else None: that MLflow lacks records, or does not answer, and what could not be drawn."""
        return "; ".join(filter(None, [self._delivery.complaint, *self._undrawn])) or None

    def emit(self, event: Event) -> None:
        """Takes an event of the engine. When a stage ends its pictures are drawn, and its last step can be looked at."""
        if isinstance(event, StepTraced):
            self._save_trace(event.trace)
            return
        if isinstance(event, SamplesGenerated):
            event = SamplesGenerated(stage=event.stage, step=event.step, rows=self._some(event.rows))
        if isinstance(event, StepFinished) and kind_of(self.config.stages[event.stage]).trains:
            self._trained_steps += 1
        self._log(event)
        if isinstance(event, StageFinished):
            if self._newest_trace is not None and self._newest_trace.step != 1:
                self._show_trace(self._newest_trace)
            self._newest_trace = None
            with page.drawing(f"pictures of stage {event.stage}", self._undrawn.append):
                events = journal.read_events(self.events_file)
                self._look_at(events, event.stage)
                self._draw(plots.stage_figures(events, event.stage), event.stage)

    def log_dataset(self, used: DatasetUsed) -> None:
        """A split that the run reads; call it before the stages that do."""
        self._log(used)

    def log_base_model(self, directory: Path, digest: str) -> None:
        """The weights that the run starts from; call it before they are evaluated."""
        self._log(BaseModelUsed(directory=str(directory), digest=digest))

    def log_file(self, path: Path, folder: str) -> None:
        """A file about the whole run, which MLflow shows under `folder`."""
        self._log(FileSaved(stage=None, file=str(path), folder=folder))

    def log_model(self, stage: str, step: int, directory: Path) -> None:
        """A stage's weights, complete, in Hugging Face format."""
        self._log(ModelSaved(stage=stage, step=step, directory=str(directory)))

    def log_reused(self, stage: str, run: str, steps: int) -> None:
        """A stage whose output lay ready, made by another run in so many steps."""
        if kind_of(self.config.stages[stage]).trains:
            self._trained_steps += steps
        self._log(StageReused(stage=stage, run=run))

    def log_result(self, stage: str, path: Path, folder: str) -> None:
        """A picture that a stage has drawn itself, or another file of its results."""
        self._log(FileSaved(stage=stage, file=str(path), folder=folder))

    def log_evaluation(self, evaluation: Evaluation, stage: str | None = None) -> Accuracy:
        """An evaluation of `stage`'s newest weights (save them with `log_model` first), or of those that the recipe starts from."""
        found = accuracy(evaluation, self.config.evaluation, self.config.seed)
        self._log(
            EvaluationFinished(
                label=evaluation.label,
                stage=stage,
                trained_steps=self._trained_steps,
                accuracy=found,
                seconds=evaluation.seconds,
                tokens=evaluation.tokens,
                rows=self._some(evaluation.rows),
            )
        )
        return found

    def _some(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Rows for one table, spread evenly, so that all prompts have their chance."""
        count = min(len(rows), self.config.tracking.samples_per_table)
        return [rows[index * len(rows) // count] for index in range(count)]

    def _save_trace(self, trace: Trace) -> None:
        """Every step's as JSON, and the first and the last step's to be looked at. Which is the last is known when the stage has ended."""
        traces.save(self.record.run, trace)
        self._newest_trace = trace
        if trace.step == 1:
            self._show_trace(trace)

    def _show_trace(self, trace: Trace) -> None:
        with page.drawing(f"the trace of step {trace.step} of stage {trace.stage}", self._undrawn.append):
            for path in traces.write(trace, self.events_file.parent / "traces" / trace.stage):
                self._log(FileSaved(stage=trace.stage, file=str(path), folder="traces"))

    def _look_at(self, events: Sequence[LoggedEvent], stage: str) -> None:
        """Whether what a stage measured is what those who read it expect. A stage that is done is not lost over a wrong record: the log says so."""
        steps = [event for event in events if isinstance(event, StepFinished) and event.stage == stage]
        metrics = [{"step": event.step, "name": name, "value": value} for event in steps for name, value in event.metrics.items()]
        samples = [row for event in events if isinstance(event, SamplesGenerated) and event.stage == stage for row in event.rows]
        for schema, rows in ((METRICS, metrics), (ROLLOUTS, samples)):
            try:
                if rows:
                    check(schema, rows, f"{self.events_file}, {schema.name} of stage {stage}")
            except DataError as error:
                logger.warning(error)

    def _draw(self, figures: Mapping[str, Any], stage: str | None) -> None:
        directory = self.events_file.parent / "plots" / (stage or "")
        for name, figure in figures.items():
            path = directory / f"{name}.png"
            plots.save(figure, path)
            self._log(FileSaved(stage=stage, file=str(path), folder="plots"))

    def _report(self, status: str, error: str | None) -> None:
        """The page of the run as it will have ended when this tracker has closed."""
        path = run_report.path(self.record.run)
        ended = self.record.model_copy(update={"status": status, "error": error})
        page.write(path, run_report.to_html(Outcome.of(ended)))
        self._log(FileSaved(stage=None, file=str(path), folder="report"))

    def _log(self, event: LoggedEvent) -> None:
        with self._lock:
            journal.append(self.events_file, event, time.time_ns() // 1_000_000)
        self._delivery.wake()
        self.record.mlflow = self._delivery.reference

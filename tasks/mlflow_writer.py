"""The event log, written into MLflow: one parent run for the recipe, a child for each stage, a child for the evaluations.

Every method takes one event of the log and can be repeated after it failed half-way. Runs are always named by their id: MLflow's
"active run" belongs to one thread, and Prefect may call from any.
"""

import json
import logging
import math
import re
import sqlite3
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Experiment, InputTag, LoggedModel, LoggedModelInput, LoggedModelOutput, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_STATE
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_PARENT_RUN_ID

from engine.events import SamplesGenerated, StageFinished, StageStarted, StepFinished
from tasks import record as records
from tasks import workspace
from tasks.journal import BaseModelUsed, DatasetUsed, Entry, EvaluationFinished, FileSaved, ModelSaved, RunFinished, RunStarted, StageReused
from tasks.outputs import manifest
from tasks.record import MLflowReference, ProcessIdentity, RunRecord
from tasks.tracker_location import database_file

logger = logging.getLogger(__name__)

EVALUATION = "evaluation"
COPIED_MODEL_BYTES = 200 * 1024**2
"""Larger models stay where they are; MLflow gets a manifest of their files."""
DIGEST_CHARACTERS = 36
"""Longest data-set digest that MLflow takes."""


class MLflowWriter:
    """Writes entries, in the order of the log (`tasks/delivery.py`), into one MLflow experiment.

    Args:
        uri: an absolute tracking URI.
        experiment: its name; made when it does not exist.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        self.uri = uri
        self.experiment = experiment
        self.reference: MLflowReference | None = None
        """Experiment and parent run, as soon as they exist."""
        self._stages: dict[str, str] = {}
        self._evaluation: str | None = None
        self._models: dict[tuple[str, int], str] = {}
        self._newest_model: dict[str | None, str] = {}
        """By stage; None stands for the weights that the run starts from."""
        self._datasets: list[DatasetUsed] = []
        self._tags: dict[str, str] = {}
        self._writers: dict[type, Callable[[Any, int], None]] = {
            RunStarted: self._start_run,
            DatasetUsed: self._log_dataset,
            BaseModelUsed: self._log_base_model,
            StageStarted: self._start_stage,
            SamplesGenerated: self._log_samples,
            StageFinished: self._finish_stage,
            StageReused: self._log_reused,
            ModelSaved: self._log_model,
            EvaluationFinished: self._log_evaluation,
            FileSaved: self._log_file,
            RunFinished: self._finish_run,
        }

    def write(self, entries: Sequence[Entry]) -> None:
        """Makes MLflow show an entry, or steps of one stage together. What nobody looks for there, such as an evaluation's progress, is left out."""
        event, time_ms = entries[0].event, entries[0].time_ms
        if isinstance(event, StepFinished):
            self._log_steps(event.stage, entries)
        elif (writer := self._writers.get(type(event))) is not None:
            writer(event, time_ms)

    @property
    def parent(self) -> str:
        """Id of the recipe's run; `RunStarted` comes before everything that needs it."""
        assert self.reference is not None
        return self.reference.run_id

    def _start_run(self, event: RunStarted, time_ms: int) -> None:
        self._client = MlflowClient(self.uri)
        experiment_id = self._experiment_id()
        switch_on_wal(self.uri)
        reap(self._client, experiment_id)
        self._tags = dict(event.tags)
        if self.reference is None:
            tags = {**self._tags, "mlflow.note.content": event.description}
            run = self._client.create_run(experiment_id, start_time=time_ms, tags=tags, run_name=event.run)
            self.reference = MLflowReference(tracking_uri=self.uri, experiment=self.experiment, experiment_id=experiment_id, run_id=run.info.run_id)
        self._client.log_batch(self.parent, params=_params({k: v for k, v in event.configuration.items() if k != "stages"}))
        self._stage_configurations = event.configuration["stages"]
        self._client.log_text(self.parent, yaml.safe_dump(dict(event.configuration), sort_keys=False, width=120), "config/resolved.yaml")
        self._client.log_dict(self.parent, dict(event.lineage), "lineage.json")

    def _experiment_id(self) -> str:
        found: Experiment | None = self._client.get_experiment_by_name(self.experiment)
        if found is None:
            # A server knows where its artifacts go; for a database MLflow would take the current directory.
            local = database_file(self.uri) is not None
            location = (workspace.artifacts_directory() / mlflow_name(self.experiment)).as_uri() if local else None
            # Else MLflow guesses what kind of experiment this is.
            kind = {"mlflow.experimentKind": "custom_model_development"}
            return str(self._client.create_experiment(self.experiment, artifact_location=location, tags=kind))
        if found.lifecycle_stage != "active":
            raise MlflowException(
                f"the MLflow experiment {self.experiment!r} is deleted: restore it with `mlflow experiments restore -x {found.experiment_id}`, "
                "or set tracking.experiment to another name",
                error_code=INVALID_STATE,
            )
        return str(found.experiment_id)

    def _child(self, name: str, time_ms: int) -> str:
        tags = {**self._tags, MLFLOW_PARENT_RUN_ID: self.parent, "almanac.stage": name}
        assert self.reference is not None
        run = self._client.create_run(self.reference.experiment_id, start_time=time_ms, tags=tags, run_name=name)
        return str(run.info.run_id)

    def _log_dataset(self, event: DatasetUsed, time_ms: int) -> None:
        self._client.log_inputs(self.parent, datasets=[_dataset_input(event)])
        self._datasets.append(event)

    def _log_base_model(self, event: BaseModelUsed, time_ms: int) -> None:
        assert self.reference is not None
        experiment = self.reference.experiment_id
        # Runs that start from the same weights share one model of the experiment.
        there = self._client.search_logged_models([experiment], filter_string=f"tags.digest = '{event.digest}'", max_results=1)
        model = there[0] if there else self._new_base_model(event, experiment)
        self._newest_model[None] = str(model.model_id)
        self._client.log_inputs(self.parent, models=[LoggedModelInput(str(model.model_id))])

    def _new_base_model(self, event: BaseModelUsed, experiment: str) -> LoggedModel:
        """Stays where it lies; MLflow gets a manifest of its files."""
        tags = {"almanac.run": self._tags["almanac.run"], "digest": event.digest, "directory": event.directory}
        model = self._client.create_logged_model(experiment, name="base", source_run_id=self.parent, tags=tags)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "manifest.json"
            _write_manifest(Path(event.directory), path)
            self._client.log_model_artifact(model.model_id, str(path))
        return self._client.finalize_logged_model(model.model_id, "READY")

    def _log_datasets_of(self, name: str, run_id: str) -> None:
        inputs = [_dataset_input(dataset) for dataset in self._datasets if name in dataset.used_by]
        if inputs:
            self._client.log_inputs(run_id, datasets=inputs)

    def _start_stage(self, event: StageStarted, time_ms: int) -> None:
        if event.stage not in self._stages:
            self._stages[event.stage] = self._child(event.stage, time_ms)
        run_id = self._stages[event.stage]
        self._client.log_batch(run_id, params=_params(self._stage_configurations[event.stage]))
        self._log_datasets_of(event.stage, run_id)

    def _log_steps(self, stage: str, entries: Sequence[Entry]) -> None:
        metrics: list[Metric] = []
        for entry in entries:
            assert isinstance(entry.event, StepFinished)
            metrics += finite_metrics(entry.event.metrics, entry.time_ms, entry.event.step)
        self._client.log_batch(self._stages[stage], metrics=metrics)

    def _log_samples(self, event: SamplesGenerated, time_ms: int) -> None:
        self._log_table(self._stages[event.stage], event.rows, f"samples/step_{event.step:05d}.json")

    def _log_table(self, run_id: str, rows: Any, file: str) -> None:
        if rows:
            self._client.log_table(run_id, {column: [row[column] for row in rows] for column in rows[0]}, file)

    def _finish_stage(self, event: StageFinished, time_ms: int) -> None:
        tags = {"almanac.ended_by": event.ended_by} | ({"almanac.ended_because": event.why} if event.why else {})
        self._client.log_batch(self._stages[event.stage], tags=[RunTag(key, value) for key, value in tags.items()])
        self._client.set_terminated(self._stages[event.stage], "FINISHED", time_ms)

    def _log_reused(self, event: StageReused, time_ms: int) -> None:
        self._client.set_tag(self.parent, f"almanac.reused.{event.stage}", event.run)

    def _log_model(self, event: ModelSaved, time_ms: int) -> None:
        run_id, directory = self._stages[event.stage], Path(event.directory)
        key = (event.stage, event.step)
        if key not in self._models:
            assert self.reference is not None
            tags = {"almanac.run": self._tags["almanac.run"], "stage": event.stage, "step": str(event.step), "directory": str(directory)}
            name = mlflow_name(event.stage).replace("/", "_").replace(":", "_").replace(".", "_")
            model = self._client.create_logged_model(self.reference.experiment_id, name=name, source_run_id=run_id, tags=tags)
            self._models[key] = str(model.model_id)
        model_id = self._models[key]
        if sum(file.stat().st_size for file in _files(directory)) <= COPIED_MODEL_BYTES:
            self._client.log_model_artifacts(model_id, str(directory))
        else:
            self._log_manifest(model_id, directory)
        self._client.finalize_logged_model(model_id, "READY")
        # Without it the run's page lists no model.
        self._client.log_outputs(run_id, [LoggedModelOutput(model_id, event.step)])
        self._newest_model[event.stage] = model_id

    def _log_manifest(self, model_id: str, directory: Path) -> None:
        # Beside the model: it says of these files what they were, also when MLflow's database is lost.
        path = directory.parent / "manifest.json"
        _write_manifest(directory, path)
        self._client.log_model_artifact(model_id, str(path))

    def _log_evaluation(self, event: EvaluationFinished, time_ms: int) -> None:
        if self._evaluation is None:
            self._evaluation = self._child(EVALUATION, time_ms)
            self._log_datasets_of(EVALUATION, self._evaluation)
        dataset = next((dataset for dataset in self._datasets if EVALUATION in dataset.used_by), None)
        model_id = self._newest_model.get(event.stage)
        values = event.accuracy.metrics() | {
            "timing/evaluation_seconds": event.seconds,
            "throughput/tokens_per_second": event.tokens / event.seconds if event.seconds else math.nan,
        }
        metrics = finite_metrics(values, time_ms, event.trained_steps, model_id=model_id, dataset=dataset)
        self._client.log_batch(self._evaluation, metrics=metrics)
        self._log_table(self._evaluation, event.rows, f"samples/{event.trained_steps:05d}_{mlflow_name(event.label)}.json")

    def _log_file(self, event: FileSaved, time_ms: int) -> None:
        if event.stage is None:
            self._client.log_artifact(self.parent, event.file, event.folder)
            return
        self._client.log_artifact(self._stages[event.stage], event.file, event.folder)
        # The parent has them all: its page is the one that people open first.
        self._client.log_artifact(self.parent, event.file, f"{event.folder}/{event.stage}")

    def _finish_run(self, event: RunFinished, time_ms: int) -> None:
        self._client.log_dict(self.parent, dict(event.summary), "summary.json")
        self._client.log_dict(self.parent, dict(event.lineage), "lineage.json")
        tags = {"mlflow.note.content": event.note} | ({"almanac.error": event.reason} if event.reason else {})
        self._client.log_batch(
            self.parent, metrics=finite_metrics(stage_results(event.summary), time_ms, 0), tags=[RunTag(k, v) for k, v in tags.items()]
        )
        children = [*self._stages.values(), *([self._evaluation] if self._evaluation else [])]
        for run_id in [*children, self.parent]:
            if self._client.get_run(run_id).info.status == "RUNNING":
                if event.reason and run_id != self.parent:
                    self._client.set_tag(run_id, "almanac.error", event.reason)
                self._client.set_terminated(run_id, event.status, time_ms)


def switch_on_wal(uri: str) -> None:
    """SQLite's write-ahead log, stored in the file: readers such as `mlflow ui` no longer block the run, and writes cost half."""
    database = database_file(uri)
    if database is None:
        return
    with closing(sqlite3.connect(database, timeout=5)) as connection:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            # Somebody is reading it in the old mode; everything works, and the next run switches.
            logger.info("%s stays without a write-ahead log: %s", database, error)


def reap(client: MlflowClient, experiment_id: str, reasons: Mapping[str, str] = MappingProxyType({})) -> None:
    """Ends, as KILLED, the runs that a process of this machine left RUNNING when it died; before that, those of our runs in `reasons` say why."""
    for run in client.search_runs([experiment_id], "attributes.status = 'RUNNING'"):
        process = run.data.tags.get("almanac.process")
        if process is not None and ProcessIdentity.model_validate_json(process).is_dead():
            if (why := reasons.get(run.data.tags.get("almanac.run", ""))) is not None:
                client.set_tag(run.info.run_id, "almanac.error", why)
            client.set_terminated(run.info.run_id, "KILLED")


def end_killed(record: RunRecord, why: str) -> None:
    """Says in the record, and in MLflow, why the process of a run died, and ends the runs that it has left RUNNING there.

    Args:
        record: one that says `killed`.
        why: a line for people.

    Raises:
        MlflowException, OSError: MLflow or the record cannot be written.
    """
    # On the disk it goes on saying that it runs: who reads it sees that the process is dead.
    records.write(record.model_copy(update={"status": "running", "error": why}))
    if record.mlflow is not None:
        reap(MlflowClient(record.mlflow.tracking_uri), record.mlflow.experiment_id, {record.run: why})


def mlflow_name(text: str) -> str:
    """A name that MLflow takes for metrics, parameters and files: letters, digits and `_-. /:`; avg@8 becomes avg_at_8."""
    return re.sub(r"[^\w\-. /:]", "_", text.replace("@", "_at_"), flags=re.ASCII)


def finite_metrics(
    values: Mapping[str, float], time_ms: int, step: int, *, model_id: str | None = None, dataset: DatasetUsed | None = None
) -> list[Metric]:
    """One batch. MLflow would draw infinity as 1.8e308 and spoil the chart: such values are left out and counted as health/nonfinite."""
    finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
    finite["health/nonfinite"] = float(len(values) - len(finite))
    name, digest = (dataset.name, dataset.digest[:DIGEST_CHARACTERS]) if dataset else (None, None)
    return [
        Metric(mlflow_name(key), value, time_ms, step, model_id=model_id, dataset_name=name, dataset_digest=digest) for key, value in finite.items()
    ]


def stage_results(summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that runs are compared by, for the table of runs: `rl/accuracy_after`, `rl/gain`, ..."""
    results: dict[str, float] = {}
    for stage in summary["stages"]:
        for key in ("accuracy_before", "accuracy_after", "greedy_after", "gain", "seconds", "tokens_per_second"):
            if stage.get(key) is not None:
                results[f"{stage['name']}/{key}"] = stage[key]
        results |= {f"{stage['name']}/{key}": value for key, value in stage.get("results", {}).items()}
        if stage.get("gain_interval"):
            results[f"{stage['name']}/gain_low"], results[f"{stage['name']}/gain_high"] = stage["gain_interval"]
    return results


def _write_manifest(directory: Path, path: Path) -> None:
    path.write_text(json.dumps({"directory": str(directory), "files": manifest(directory)}, indent=2) + "\n")


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise FileNotFoundError(f"the model's directory {directory} is gone")
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _params(configuration: Mapping[str, Any], prefix: str = "") -> list[Param]:
    """Settings that are set, flat: `training.optimizer.learning_rate`."""
    params: list[Param] = []
    for key, value in configuration.items():
        if isinstance(value, Mapping):
            params += _params(value, f"{prefix}{key}.")
        elif value is not None:
            params.append(Param(mlflow_name(f"{prefix}{key}"), str(value)))
    return params


def _dataset_input(event: DatasetUsed) -> DatasetInput:
    dataset = Dataset(
        name=event.name,
        digest=event.digest[:DIGEST_CHARACTERS],
        source_type="local",
        source=json.dumps({"uri": event.source}),
        profile=json.dumps({"num_rows": event.rows}),
        schema=json.dumps({"mlflow_colspec": [{"name": name, "type": kind} for name, kind in event.columns.items()]}) if event.columns else None,
    )
    tags = [InputTag(MLFLOW_DATASET_CONTEXT, event.context)]
    return DatasetInput(dataset, tags=[*tags, InputTag("dvc.md5", event.md5)] if event.md5 else tags)

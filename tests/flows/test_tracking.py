"""A run's records in a real MLflow on SQLite, and what becomes of them when MLflow fails."""

import json
import math
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric, Run
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from waiting import wait_for

from engine.control.trace import Trace
from engine.events import EvaluationProgressed, SamplesGenerated, StageFinished, StageStarted, StepFinished, StepTraced
from tasks import journal, mlflow_writer, tracker_location
from tasks.config import RecipeConfig
from tasks.journal import DatasetUsed
from tasks.lineage import Lineage
from tasks.record import ProcessIdentity, RunRecord, StageRecord
from tasks.tracking import Tracker

OPTIMIZER = {"optimizer": {"learning_rate": 1e-3}}
TEST_SPLIT = DatasetUsed(name="sums-test", digest="2" * 64, rows=2, context="test", source="data/test.parquet", used_by=["evaluation"])
CONFIG = RecipeConfig.model_validate(
    {
        "name": "tiny",
        "description": "Two tiny stages",
        "data": {"chain_sum": {}},
        "model": {"architecture": {}},
        "stages": {
            "sft": {"kind": "sft", "steps": 2, "training": OPTIMIZER},
            "rl": {
                "kind": "rl",
                "steps": 3,
                "prompts_per_step": 2,
                "max_prompt_tokens": 8,
                "max_response_tokens": 8,
                "training": OPTIMIZER,
            },
        },
        "evaluation": {"bootstrap_resamples": 50},
        "tracking": {"samples_per_table": 3},
    }
)


@dataclass(frozen=True)
class Evaluation:
    """Stands for the engine's, which imports torch."""

    label: str
    prompt_ids: list[str]
    difficulties: list[str]
    greedy: list[float]
    samples: list[list[float]]
    rows: list[dict[str, Any]]
    seconds: float = 2.0
    tokens: int = 100


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow makes its tables once for all tests."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def root(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    # A blank in the path: artifact locations are addresses.
    root = tmp_path / "a project"
    root.mkdir()
    shutil.copy(empty_database, root / "mlflow.db")
    monkeypatch.setenv("ALMANAC_ROOT", str(root))
    monkeypatch.chdir(tmp_path)
    return root


@pytest.fixture
def client(root: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{root / 'mlflow.db'}")


def record(run: str = "tiny-20260101-000000") -> RunRecord:
    stages = [StageRecord(name="sft", kind="sft", steps_planned=2), StageRecord(name="rl", kind="rl", steps_planned=3)]
    return RunRecord(run=run, recipe="tiny", seed=0, lineage=Lineage(configuration_digest="c", seed=0, commit="abc"), stages=stages)


MORE = {"ground_truth": "2", "difficulty": "2", "response_tokens": 1}


def rows(count: int) -> list[dict[str, Any]]:
    return [{"sample_id": f"rl/1/a/{k}", "prompt": "1+1", "response": str(k), "reward": float(k == 2), **MORE} for k in range(count)]


def evaluation(label: str, score: float) -> Evaluation:
    return Evaluation(label, ["a", "b"], ["2", "3 (hard)"], [score, 0.0], [[score] * 8, [0.0] * 8], rows(18))


def train(tracker: Tracker, stage: str, kind: str, steps: int) -> None:
    tracker.emit(StageStarted(stage=stage, kind=kind, steps=steps))
    for step in range(1, steps + 1):
        metrics = {"reward/mean": step / 10, "policy/entropy": 1.0, "policy/loss": math.nan if step == 2 else 0.5}
        tracker.emit(StepFinished(stage=stage, step=step, metrics=metrics))
    tracker.emit(SamplesGenerated(stage=stage, step=steps, rows=rows(6)))
    tracker.emit(StageFinished(stage=stage, steps=steps, seconds=1.0))


def model(root: Path) -> Path:
    directory = root / "model"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"\0" * 1000)
    return directory


def runs(client: MlflowClient) -> dict[str, Run]:
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def history(client: MlflowClient, run: Run, metric: str) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, metric))


def artifacts(client: MlflowClient, run: Run, directory: str = "") -> set[str]:
    found: set[str] = set()
    for item in client.list_artifacts(run.info.run_id, directory):
        found |= artifacts(client, run, item.path) if item.is_dir else {item.path}
    return found


def test_a_whole_run_arrives(root: Path, client: MlflowClient) -> None:
    run = record()
    with Tracker(CONFIG, run) as tracker:
        of_train = {"name": "sums-train", "digest": "1" * 64, "rows": 10, "context": "training", "source": "data/train.parquet", "used_by": ["rl"]}
        tracker.log_dataset(DatasetUsed(**of_train, md5="4" * 32, columns={"prompt": "string"}))
        tracker.log_dataset(TEST_SPLIT)
        tracker.log_base_model(model(root), "3" * 64)
        tracker.emit(EvaluationProgressed(label="base", done=1, total=2))
        tracker.log_evaluation(evaluation("base", 0.0))
        train(tracker, "sft", "sft", 2)
        train(tracker, "rl", "rl", 3)
        tracker.log_model("rl", 3, model(root))
        found = tracker.log_evaluation(evaluation("rl", 1.0), stage="rl")
        run.stage("rl").accuracy_after = found.average.mean
    assert tracker.complaint is None
    assert found.average.mean == 0.5

    # Mutation: leave the tag mlflow.parentRunId out; the pages show four runs side by side.
    found_runs = runs(client)
    assert set(found_runs) == {run.run, "sft", "rl", "evaluation"}
    parent = found_runs[run.run]
    assert {found_runs[name].data.tags["mlflow.parentRunId"] for name in ("sft", "rl", "evaluation")} == {parent.info.run_id}
    assert {found.info.status for found in found_runs.values()} == {"FINISHED"}
    assert run.mlflow is not None
    assert run.mlflow.run_id == parent.info.run_id

    assert parent.data.params["model.architecture.hidden_size"] == "128"
    assert found_runs["rl"].data.params["algorithm.loss.clip_high"] == "0.28"
    assert parent.data.metrics["rl/accuracy_after"] == 0.5
    assert parent.data.tags["mlflow.source.git.commit"] == "abc"
    assert parent.data.tags["almanac.run"] == run.run
    assert parent.data.tags["mlflow.note.content"].startswith("Two tiny stages\n\n| stage |")
    assert {"config/resolved.yaml", "lineage.json", "summary.json", "plots/accuracy.png", "plots/rl/reward.png", "report/report.html"} <= artifacts(
        client, parent
    )
    assert {"plots/reward.png", "samples/step_00003.json"} <= artifacts(client, found_runs["rl"])

    inputs = {item.dataset.name: item for item in parent.inputs.dataset_inputs}
    assert inputs["sums-test"].dataset.digest == "2" * 36
    # Mutation: leave out what DVC knows the file by.
    assert {tag.key: tag.value for tag in inputs["sums-train"].tags} == {"mlflow.data.context": "training", "dvc.md5": "4" * 32}
    assert json.loads(inputs["sums-train"].dataset.schema) == {"mlflow_colspec": [{"name": "prompt", "type": "string"}]}
    assert json.loads(inputs["sums-train"].dataset.profile) == {"num_rows": 10}
    assert {tag.value for item in inputs.values() for tag in item.tags if tag.key == "mlflow.data.context"} == {"training", "test"}
    assert [item.dataset.name for item in found_runs["rl"].inputs.dataset_inputs] == ["sums-train"]

    # A search leaves models out.
    base = client.get_logged_model(client.get_run(parent.info.run_id).inputs.model_inputs[0].model_id)
    assert (base.name, base.tags["digest"], base.tags["directory"]) == ("base", "3" * 64, str(root / "model"))
    # Mutation: leave the id out of the evaluation's metrics; the page of models then lists the base without its accuracy.
    assert {metric.key: metric.value for metric in base.metrics or []}["accuracy/avg_at_8"] == 0.0
    assert {item.path for item in client.list_logged_model_artifacts(base.model_id)} == {"manifest.json"}


def test_runs_from_the_same_weights_share_their_base_model(root: Path, client: MlflowClient) -> None:
    # Mutation: always make a new one; the page of models then has as many bases as runs.
    for number, digest in enumerate(("3" * 64, "3" * 64, "4" * 64)):
        with Tracker(CONFIG, record(f"tiny-20260101-00000{number}")) as tracker:
            tracker.log_base_model(model(root), digest)
    inputs = [client.get_run(run.info.run_id).inputs.model_inputs[0].model_id for _, run in sorted(runs(client).items())]
    assert inputs[0] == inputs[1] != inputs[2]


def test_metrics_of_steps_and_evaluations(root: Path, client: MlflowClient) -> None:
    with Tracker(CONFIG, record()) as tracker:
        tracker.log_dataset(TEST_SPLIT)
        tracker.log_evaluation(evaluation("base", 0.0))
        train(tracker, "sft", "sft", 2)
        tracker.log_model("sft", 2, model(root))
        tracker.log_evaluation(evaluation("sft", 1.0), stage="sft")
    found = runs(client)
    assert history(client, found["sft"], "reward/mean") == [(1, 0.1), (2, 0.2)]
    # Mutation: send NaN too; MLflow then has two losses.
    assert history(client, found["sft"], "policy/loss") == [(1, 0.5)]
    assert history(client, found["sft"], "health/nonfinite") == [(1, 0.0), (2, 1.0)]
    # The evaluations' axis is the number of steps trained so far.
    assert history(client, found["evaluation"], "accuracy/avg_at_8") == [(0, 0.0), (2, 0.5)]
    assert history(client, found["evaluation"], "accuracy_by_difficulty/avg_at_8/3 _hard_") == [(0, 0.0), (2, 0.0)]

    [logged] = client.search_logged_models([found["sft"].info.experiment_id])
    assert [output.model_id for output in found["sft"].outputs.model_outputs] == [logged.model_id]
    assert logged.status == "READY"
    assert {item.path for item in client.list_logged_model_artifacts(logged.model_id)} == {"config.json", "model.safetensors"}
    [accuracy] = [metric for metric in logged.metrics if metric.key == "accuracy/avg_at_8"]
    assert (accuracy.value, accuracy.dataset_name, accuracy.step) == (0.5, "sums-test", 2)


def test_tables_hold_some_rows_spread_evenly(root: Path, client: MlflowClient) -> None:
    with Tracker(CONFIG, record()) as tracker:
        train(tracker, "rl", "rl", 1)
    found = runs(client)["rl"]
    table = json.loads(Path(client.download_artifacts(found.info.run_id, "samples/step_00001.json")).read_text())
    # What MLflow's page shows as a table has this tag.
    assert "samples/step_00001.json" in found.data.tags["mlflow.loggedArtifacts"]
    # 3 of 6. Mutation: take the first ones; they belong to one prompt.
    assert [row[table["columns"].index("response")] for row in table["data"]] == ["0", "2", "4"]
    [event] = [e for e in journal.read_events(tracker.events_file) if isinstance(e, SamplesGenerated)]
    assert len(event.rows) == 3


def test_large_models_leave_a_manifest(root: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_writer, "COPIED_MODEL_BYTES", 10)
    with Tracker(CONFIG, record()) as tracker:
        train(tracker, "rl", "rl", 1)
        tracker.log_model("rl", 1, model(root))
    [logged] = client.search_logged_models([runs(client)["rl"].info.experiment_id])
    assert [item.path for item in client.list_logged_model_artifacts(logged.model_id)] == ["manifest.json"]
    files = mlflow_writer.manifest(root / "model")
    # sha256 of a thousand zero bytes, by sha256sum.
    assert files["model.safetensors"] == {"bytes": 1000, "sha256": "541b3e9daa09b20bf85fa273e5cbd3e80185aa4ec298e765db87742b70138a53"}


def test_artifacts_lie_under_the_root_and_the_database_has_a_write_ahead_log(root: Path, client: MlflowClient) -> None:
    # Mutation: leave the artifact location to MLflow; it takes the current directory. Mutation: no PRAGMA.
    with Tracker(CONFIG, record()) as tracker:
        train(tracker, "rl", "rl", 2)
        tracker.log_model("rl", 2, model(root))
    assert list((root / "mlruns" / "tiny").rglob("resolved.yaml"))
    assert list((root / "mlruns" / "tiny").rglob("model.safetensors"))
    assert [path.name for path in Path.cwd().iterdir()] == [root.name]
    with sqlite3.connect(root / "mlflow.db") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_an_exception_fails_the_runs_with_its_reason(root: Path, client: MlflowClient) -> None:
    # Mutation: end runs as FINISHED in every case.
    def breaks_down() -> None:
        with Tracker(CONFIG, record()) as tracker:
            train(tracker, "sft", "sft", 2)
            tracker.emit(StageStarted(stage="rl", kind="rl", steps=3))
            tracker.emit(StepFinished(stage="rl", step=1, metrics={"reward/mean": 0.5}))
            raise RuntimeError("the worker died")

    with pytest.raises(RuntimeError, match="the worker died"):
        breaks_down()
    found = runs(client)
    assert {name: run.info.status for name, run in found.items()} == {record().run: "FAILED", "rl": "FAILED", "sft": "FINISHED"}
    assert {found[name].data.tags.get("almanac.error") for name in (record().run, "rl")} == {"RuntimeError: the worker died"}
    assert "plots/seconds_by_phase.png" not in artifacts(client, found[record().run])


def test_a_tracker_that_fails_midway_catches_up(root: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation: move the cursor although writing failed; steps 2 and 3 are then missing.
    monkeypatch.setattr("tasks.delivery.GATHER_SECONDS", 0.01)
    # A pause of a second is all that there is.
    monkeypatch.setattr("tasks.delivery.PAUSE_FACTOR", 0)
    log_batch = MlflowClient.log_batch
    calls: list[float] = []

    def fails(self: MlflowClient, run_id: str, **fields: Any) -> None:
        calls.append(time.monotonic())
        raise MlflowException("API request to http://tracker failed with exception: connection refused")

    def arrived() -> list[tuple[int, float]]:
        return history(client, runs(client)["rl"], "reward/mean") if "rl" in runs(client) else []

    with Tracker(CONFIG, record()) as tracker:
        tracker.emit(StageStarted(stage="rl", kind="rl", steps=3))
        tracker.emit(StepFinished(stage="rl", step=1, metrics={"reward/mean": 0.1}))
        wait_for("the first step", lambda: arrived() == [(1, 0.1)], 30)
        monkeypatch.setattr(MlflowClient, "log_batch", fails)
        for step in (2, 3):
            tracker.emit(StepFinished(stage="rl", step=step, metrics={"reward/mean": step / 10}))
        wait_for("two attempts", lambda: len(calls) >= 2, 30)
        # Mutation: no pause; MLflow is then asked without end.
        assert calls[1] - calls[0] >= 1
        assert tracker.complaint is not None
        assert tracker.complaint.startswith("2 records are not in MLflow")
        monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
        # Nothing more happens, and yet it is sent. Mutation: wait for the next event.
        wait_for("the others", lambda: arrived() == [(1, 0.1), (2, 0.2), (3, 0.3)], 30)
        assert tracker.complaint is None
        tracker.emit(StepFinished(stage="rl", step=4, metrics={"reward/mean": 0.4}))
    assert tracker.complaint is None
    assert history(client, runs(client)["rl"], "reward/mean") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    # Points keep the time at which they happened.
    entries = [entry for entry in journal.read(tracker.events_file) if isinstance(entry.event, StepFinished)]
    points = client.get_metric_history(runs(client)["rl"].info.run_id, "reward/mean")
    assert sorted(point.timestamp for point in points) == [entry.time_ms for entry in entries]


def test_a_refused_record_does_not_hold_up_the_others(root: Path, client: MlflowClient) -> None:
    # Mutation: count a missing directory among the failures that pass; everything after it waits for ever.
    with Tracker(CONFIG, record()) as tracker:
        tracker.emit(StageStarted(stage="rl", kind="rl", steps=1))
        tracker.log_model("rl", 1, root / "gone")
        tracker.emit(StepFinished(stage="rl", step=1, metrics={"reward/mean": 0.5}))
    assert tracker.complaint is not None
    assert "1 records are not in MLflow" in tracker.complaint
    assert "gone" in tracker.complaint
    assert history(client, runs(client)["rl"], "reward/mean") == [(1, 0.5)]


def test_quick_steps_are_sent_together_and_a_refused_one_alone_is_missing(root: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    log_batch = MlflowClient.log_batch
    sent: list[set[int]] = []

    def refuses(self: MlflowClient, run_id: str, metrics: Sequence[Metric] = (), **fields: Any) -> None:
        sent.append({metric.step for metric in metrics})
        if 7 in sent[-1]:
            raise MlflowException("not this one", error_code=INVALID_PARAMETER_VALUE)
        log_batch(self, run_id, metrics, **fields)

    with Tracker(CONFIG, record()) as tracker:
        tracker.emit(StageStarted(stage="rl", kind="rl", steps=20))
        monkeypatch.setattr(MlflowClient, "log_batch", refuses)
        for step in range(1, 21):
            tracker.emit(StepFinished(stage="rl", step=step, metrics={"reward/mean": step / 10}))
    # Mutation: send every step by itself.
    assert {*range(1, 21)} in sent
    # Mutation: pass over all that were refused together.
    assert [step for step, _ in history(client, runs(client)["rl"], "reward/mean")] == [step for step in range(1, 21) if step != 7]
    assert tracker.complaint is not None
    assert tracker.complaint.startswith("1 records are not in MLflow")


def test_a_server_that_is_away_stops_nothing_and_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = record()
    with Tracker(CONFIG, run) as tracker:
        assert tracker.complaint is not None
        assert "http://127.0.0.1:9" in tracker.complaint
        train(tracker, "rl", "rl", 3)
    assert tracker.complaint is not None
    assert str(tracker.events_file) in tracker.complaint
    assert run.mlflow is None
    assert [event.step for event in journal.read_events(tracker.events_file) if isinstance(event, StepFinished)] == [1, 2, 3]


def test_a_deleted_experiment_is_an_error_before_anything_starts(root: Path, client: MlflowClient) -> None:
    client.delete_experiment(client.create_experiment("tiny"))
    with pytest.raises(ValueError, match=r"'tiny' is deleted: restore it.*tracking\.experiment"), Tracker(CONFIG, record()):
        pytest.fail("entered")


def test_runs_of_dead_processes_are_ended(root: Path, client: MlflowClient) -> None:
    # Mutation: end every run that is RUNNING; the one of this living process is then KILLED too.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started = psutil.Process(child.pid).create_time()
    mine = ProcessIdentity.current()
    experiment = client.create_experiment("tiny")
    dead = {"almanac.process": mine.model_copy(update={"pid": child.pid, "started": started}).model_dump_json()}
    for name, tags in (("dead", dead), ("alive", {"almanac.process": mine.model_dump_json()}), ("not ours", {})):
        client.create_run(experiment, tags=tags, run_name=name)
    with Tracker(CONFIG, record()):
        pass
    assert {name: found.info.status for name, found in runs(client).items()} == {
        "dead": "KILLED",
        "alive": "RUNNING",
        "not ours": "RUNNING",
        record().run: "FINISHED",
    }


def test_events_may_come_from_any_thread(root: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation: send in the thread that reports; two threads then send the same lines.
    monkeypatch.setattr("tasks.delivery.GATHER_SECONDS", 0.01)
    write, written = mlflow_writer.MLflowWriter.write, []

    def slowly(self: mlflow_writer.MLflowWriter, entries: Sequence[journal.Entry]) -> None:
        written.extend(entry.end for entry in entries)
        time.sleep(0.01)
        write(self, entries)

    monkeypatch.setattr(mlflow_writer.MLflowWriter, "write", slowly)
    with Tracker(CONFIG, record()) as tracker:
        tracker.emit(StageStarted(stage="rl", kind="rl", steps=8))
        threads = [
            threading.Thread(target=tracker.emit, args=(StepFinished(stage="rl", step=step, metrics={"reward/mean": step / 10}),))
            for step in range(1, 9)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert history(client, runs(client)["rl"], "reward/mean") == [(step, step / 10) for step in range(1, 9)]
    assert written == sorted(set(written))


def test_no_step_waits_for_mlflow(root: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation: send in the thread that reports; it then waits for ever.
    write, may_go_on = mlflow_writer.MLflowWriter.write, threading.Event()

    def stands(self: mlflow_writer.MLflowWriter, entries: Sequence[journal.Entry]) -> None:
        if isinstance(entries[0].event, StepFinished):
            assert may_go_on.wait(60)
        write(self, entries)

    monkeypatch.setattr(mlflow_writer.MLflowWriter, "write", stands)
    monkeypatch.setattr("tasks.delivery.GATHER_SECONDS", 0.01)
    with Tracker(CONFIG, record()) as tracker:
        train(tracker, "rl", "rl", 3)
        # What only waits is nothing to complain of.
        assert tracker.complaint is None
        assert "rl" not in runs(client) or history(client, runs(client)["rl"], "reward/mean") == []
        may_go_on.set()
    assert len(history(client, runs(client)["rl"], "reward/mean")) == 3


def test_a_fault_of_ours_is_not_lost_in_the_thread(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation: end the thread without a word; the run then ends as if MLflow had everything.
    write = mlflow_writer.MLflowWriter.write

    def breaks(self: mlflow_writer.MLflowWriter, entries: Sequence[journal.Entry]) -> None:
        if isinstance(entries[0].event, StepFinished):
            raise KeyError("a fault")
        write(self, entries)

    monkeypatch.setattr(mlflow_writer.MLflowWriter, "write", breaks)
    monkeypatch.setattr("tasks.delivery.GATHER_SECONDS", 0.01)
    with pytest.raises(KeyError, match="a fault"), Tracker(CONFIG, record()) as tracker:
        train(tracker, "rl", "rl", 3)


def test_what_cannot_be_drawn_costs_the_run_nothing(root: Path, client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation: let the error through; a run that has trained well is FAILED, and one that failed says the wrong reason.
    def breaks(*anything: object) -> str:
        raise ZeroDivisionError("no pixels")

    for what in ("tasks.run_report.to_html", "tasks.plots.stage_figures", "tasks.traces.write"):
        monkeypatch.setattr(what, breaks)
    with Tracker(CONFIG, record()) as tracker:
        tracker.emit(StepTraced(trace=Trace("rl", 1, [], [], [], 0, 0)))
        train(tracker, "rl", "rl", 3)
    lacking = ("the trace of step 1 of stage rl", "pictures of stage rl", "the run's pictures and page")
    # Mutation: remember the last one only.
    assert tracker.complaint == "; ".join(f"{what} could not be drawn: ZeroDivisionError: no pixels" for what in lacking)
    assert {found.info.status for found in runs(client).values()} == {"FINISHED"}
    with pytest.raises(RuntimeError, match="the worker died"), Tracker(CONFIG, record("tiny-20260101-000001")):
        raise RuntimeError("the worker died")
    failed = runs(client)["tiny-20260101-000001"]
    assert (failed.info.status, failed.data.tags["almanac.error"]) == ("FAILED", "RuntimeError: the worker died")


def test_names_of_the_user_win(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracker_location.tracking_uri() == f"sqlite:///{root}/mlflow.db"
    assert tracker_location.experiment_name(CONFIG) == "tiny"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from the environment")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker")
    assert tracker_location.experiment_name(CONFIG) == "from the environment"
    assert tracker_location.tracking_uri() == "http://tracker"
    setting = CONFIG.model_copy(update={"tracking": CONFIG.tracking.model_copy(update={"experiment": "setting"})})
    assert tracker_location.experiment_name(setting) == "setting"


def test_artifacts_that_cannot_be_written_are_an_error_before_anything_starts(root: Path) -> None:
    (root / "mlruns").write_text("a file where the directory should be")
    with pytest.raises(OSError, match=r"MLflow's records cannot be written.*mlruns"), Tracker(CONFIG, record()):
        pytest.fail("entered")
    assert not (root / ".work").exists()


def test_the_database_may_be_a_directory_by_mistake(root: Path) -> None:
    (root / "mlflow.db").unlink()
    (root / "mlflow.db").mkdir()
    with pytest.raises(OSError, match=r"MLflow's records cannot be written.*mlflow\.db"):
        tracker_location.check_writable()

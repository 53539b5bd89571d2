"""The frame around a run, with a tracker that only notes what it is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from small_recipe import SMALL

from engine.control.deadline import WorkerError
from engine.events import StageFinished, StageStarted, StepFinished, WeightsSynchronised
from engine.reshard.ledger import Ledger
from tasks import compose, context, record, stages, workspace
from tasks.context import RunContext, add_step, open_run
from tasks.journal import DatasetUsed
from tasks.lineage import ChangedInputError, Lineage
from tasks.progress import FINISH, PhaseFinished, PhaseStarted
from tasks.record import StageRecord, Synchronisations

RUN = "grpo_tiny-20261129-140312"
told: list[tuple[str, Any]] = []


class Notes:
    """Stands for the tracker."""

    complaint = None

    def __init__(self, config: object, run_record: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        told.append(("tracker closed", kind))

    def emit(self, event: object) -> None:
        told.append(("tracker", event))

    def log_base_model(self, directory: object, digest: object) -> None:
        told.append(("base model", digest))

    def log_dataset(self, used: DatasetUsed) -> None:
        told.append(("dataset", used.name))


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    monkeypatch.setattr(context, "Tracker", Notes)
    told.clear()


def run(body: Callable[[RunContext], None]) -> None:
    with open_run(compose.compose(["recipe=grpo_tiny"]), RUN, lambda event: told.append(("display", event))) as opened:
        body(opened)


def step(number: int, *, generate: float = 1.0, update: float = 2.0, whole: float = 4.0, tokens_per_second: float = 100.0) -> StepFinished:
    timings = {"timing/generate_seconds": generate, "timing/update_seconds": update, "timing/step_seconds": whole}
    return StepFinished(stage="rl", step=number, metrics={**timings, "throughput/tokens_per_second": tokens_per_second})


def test_events_reach_the_tracker_before_the_display() -> None:
    # Mutation: the other order lets a display that fails lose a record.
    event = StageStarted(stage="sft", kind="sft", steps=450)
    run(lambda opened: opened.emit(event))
    assert told[:2] == [("tracker", event), ("display", event)]


def test_a_run_that_ends_is_finished() -> None:
    def body(opened: RunContext) -> None:
        assert record.load(RUN).status == "running"
        opened.emit(StageStarted(stage="rl", kind="rl", steps=2))
        opened.emit(step(1))
        for version, ranks in enumerate(
            ([Ledger(5, peak_extra_bytes=7, seconds=1.0), Ledger(1)], [Ledger(6, peak_extra_bytes=4, seconds=0.5), Ledger(2)])
        ):
            opened.emit(WeightsSynchronised(stage="rl", step=2, version=version, ranks=ranks))
        opened.emit(step(2))
        opened.emit(StageFinished(stage="rl", steps=2, seconds=9.0))
        assert record.load(RUN).stage("rl").steps == 2

    run(body)
    found = record.load(RUN)
    assert (found.status, found.error) == ("finished", None)
    assert found.finished is not None
    assert found.stage("rl").seconds == 9.0
    # By rank, over the stage. Mutations: the last one alone; ranks added to each other; the sum of the peaks.
    assert found.stage("rl").synchronisations == Synchronisations(count=2, ranks=[Ledger(11, peak_extra_bytes=7, seconds=1.5), Ledger(3)])
    assert found.stage("sft").synchronisations is None
    # The plots are drawn when the tracker closes: inside the phase that says so.
    assert told[-3:] == [("display", PhaseStarted(phase=FINISH)), ("tracker closed", None), ("display", PhaseFinished(phase=FINISH))]


def test_a_stage_that_converged_is_finished_with_the_steps_that_it_did() -> None:
    def body(opened: RunContext) -> None:
        opened.emit(StageStarted(stage="rl", kind="rl", steps=9))
        opened.emit(step(1))
        opened.emit(StageFinished(stage="rl", steps=1, seconds=4.0, ended_by="convergence", why="nothing grew"))

    run(body)
    stage = record.load(RUN).stage("rl")
    assert (stage.steps, stage.steps_planned, stage.ended_by, stage.ended_because) == (1, 9, "convergence", "nothing grew")


def test_what_was_changed_since_it_was_hashed_is_not_loaded(tmp_path: Path) -> None:
    """The lineage lies on the disk before anything is loaded. Mutation: `Engine.session` opens the directory, or `create_model` saves nothing."""
    config = compose.compose([setting for setting in SMALL if not setting.startswith("resources")])

    def body(opened: RunContext) -> None:
        stages.create_model(opened)
        stages.prepare_data(opened)
        lineage = Lineage.model_validate_json(record.lineage_file(RUN).read_text())
        assert lineage.base_model_digest == opened.weights.digest
        assert lineage.dataset_digests == opened.data.digests
        with (opened.weights.directory / "config.json").open("a") as file:
            file.write(" ")
        opened.session  # noqa: B018 - the engine starts where it is asked for

    with (
        pytest.raises(ChangedInputError, match=r"^model .* is not what the run's lineage says"),
        open_run(config, RUN, lambda event: None) as context,
    ):
        body(context)
    found = record.load(RUN)
    assert (found.status, (found.error or "").partition(" ")[0]) == ("failed", "model")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("stages.rl.steps: too many"), "stages.rl.steps: too many"),
        (OSError(28, "No space left on device", "/x"), "[Errno 28] No space left on device: '/x'"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(143), "terminated"),
    ],
)
def test_whatever_ends_a_run_stands_in_its_record(error: BaseException, said: str) -> None:
    # Mutation: `except Exception` misses Ctrl-C and SIGTERM.
    def body(opened: RunContext) -> None:
        opened.emit(StageStarted(stage="rl", kind="rl", steps=2))
        opened.emit(step(1))
        raise error

    with pytest.raises(type(error)):
        run(body)
    found = record.load(RUN)
    assert (found.status, found.error) == ("failed", said)
    assert [(stage.name, stage.status) for stage in found.stages] == [("sft", "planned"), ("rl", "failed")]
    assert found.stage("rl").steps == 1
    assert told[-1] == ("tracker closed", type(error))


def test_a_full_disk_does_not_hide_the_error_that_ended_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(changed: object) -> None:
        raise OSError(28, "No space left on device")

    def body(opened: RunContext) -> None:
        monkeypatch.setattr(record, "write", refuse)
        raise WorkerError("actor rank 1, update: the worker's process is gone.")

    with pytest.raises(WorkerError, match="rank 1"):
        run(body)


def test_a_run_keeps_room_for_its_last_words_and_gives_it_back() -> None:
    reserve = workspace.run_directory(RUN) / ".reserve"

    def body(opened: RunContext) -> None:
        assert reserve.stat().st_size > 0
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        run(body)
    assert not reserve.exists()
    run(lambda opened: None)
    assert not reserve.exists()


def test_seconds_and_tokens_add_up_over_steps() -> None:
    stage = StageRecord(name="rl", kind="rl", steps_planned=2)
    add_step(stage, step(1))
    add_step(stage, step(2, generate=2.0, update=3.0, whole=6.0, tokens_per_second=50.0))
    # 4 s and 6 s, of which 1 + 2 generate, 2 + 3 update; the rest, 1 + 1, is other. 4 x 100 + 6 x 50 tokens in 10 s.
    assert stage.seconds_by_phase == pytest.approx({"generate": 3.0, "update": 5.0, "other": 2.0})
    # Mutation: the mean of the rates is 75.
    assert stage.tokens_per_second == pytest.approx(70.0)
    assert (stage.steps, stage.seconds) == (2, pytest.approx(10.0))


def test_prefect_cannot_walk_into_a_context() -> None:
    """Prefect encodes the parameters of flows as JSON, through every attribute it finds: with the data inside, that takes minutes."""
    from fastapi.encoders import jsonable_encoder

    def body(opened: RunContext) -> None:
        # Mutation: without __slots__ the encoder goes through all fields.
        with pytest.raises(ValueError, match="vars"):
            jsonable_encoder(opened)
        json.dumps(jsonable_encoder(opened.config))

    run(body)

"""What a person sees of a run."""

import io
import json
import socket
from pathlib import Path

import pytest
from rich.console import Console

from tasks import show
from tasks.record import BeforeAfter, Lineage, MLflowReference, RunRecord, StageRecord


def finished() -> RunRecord:
    rl = StageRecord(
        name="rl",
        kind="rl",
        status="finished",
        steps_planned=120,
        steps=120,
        samples_per_prompt=8,
        confidence=0.95,
        accuracy_before=0.523,
        interval_before=(0.493, 0.551),
        accuracy_after=0.744,
        interval=(0.71, 0.77),
        greedy_before=0.56,
        greedy_after=0.77,
        gain=0.221,
        gain_interval=(0.19, 0.251),
        by_difficulty={"2": BeforeAfter(before=0.9, after=1.0)},
        seconds=431.0,
        seconds_by_phase={"update": 140.0, "generate": 200.0, "reward": 1.25, "synchronise": 9.31},
        tokens_per_second=8123.4,
        model="stages/rl/model",
    )
    return RunRecord(
        run="polaris_tiny-20261129-140312",
        status="finished",
        recipe="polaris_tiny",
        seed=0,
        stages=[rl],
        final_model="/models/[x]/" + "long/" * 20 + "model",
        lineage=Lineage(configuration_digest="c", seed=0, commit="abc"),
        mlflow=MLflowReference(tracking_uri="sqlite:////db", experiment="polaris_tiny", experiment_id="7", run_id="f00"),
        log_file="/logs/almanac.log",
    )


def text(record: RunRecord) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(show.table(record))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_summary_is_json_with_everything_that_programs_ask_for() -> None:
    summary = json.loads(json.dumps(show.summary(finished()), allow_nan=False))
    assert {"run", "status", "recipe", "stages", "final_model", "lineage"} <= set(summary)
    [stage] = summary["stages"]
    assert {"accuracy_before", "accuracy_after", "interval", "steps", "seconds", "tokens_per_second"} <= set(stage)
    assert (stage["accuracy_before"], stage["interval"], stage["steps"]) == (0.523, [0.71, 0.77], 120)
    assert summary["lineage"]["commit"] == "abc"


def test_table_shows_the_numbers_and_the_ways_on_within_100_columns() -> None:
    shown = text(finished())
    assert max(map(len, shown.splitlines())) <= 100
    for expected in (
        "finished",
        "avg@8 before",
        "95 % interval",
        "52.3 [49.3, 55.1]",
        "74.4 [71.0, 77.0]",
        "+22.1 [+19.0, +25.1]",
        "56.0 → 77.0",
        "8,123",
        "almanac ui",
        "almanac show polaris_tiny-20261129-140312 --json",
        "/logs/almanac.log",
    ):
        assert expected in shown
    # Mutation: pass the path as markup; `[x]` is then a style and vanishes. Mutation: no `fold`; its end is then cut off.
    unbroken = "".join(line.strip() for line in shown.splitlines())
    assert unbroken.count("/models/[x]/") == 2
    assert unbroken.count("/model") >= 4


def test_phases_stand_in_the_order_of_a_step() -> None:
    header = next(line for line in text(finished()).splitlines() if "tokens/s" in line)
    assert header.split() == ["stage", "generate", "reward", "update", "synchronise", "all", "tokens/s"]


def test_a_run_that_failed_early_can_be_shown() -> None:
    record = finished()
    record.status, record.error, record.final_model = "failed", "ValueError: [nothing] left", None
    record.stages = [StageRecord(name="rl", kind="rl", steps_planned=120)]
    shown = text(record)
    assert "ValueError: [nothing] left" in shown
    assert "0/120" in shown
    assert "almanac evaluate MODEL" in shown
    assert "Seconds" not in shown
    show.note(record, "a recipe")


def test_note_is_a_markdown_table() -> None:
    note = show.note(finished(), "Chained sums").splitlines()
    assert note[0] == "Chained sums"
    assert {line.count("|") for line in note if line.startswith("|")} == {8}
    assert "+22.1 [+19.0, +25.1]" in "\n".join(note)


def test_address_of_a_run() -> None:
    assert show.run_url("http://host:1/", finished()) == "http://host:1/#/experiments/7/runs/f00?workflowType=machine_learning"
    assert show.run_url("http://host:1", None) == "http://host:1"


def test_a_taken_port_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} .*--port"):
            show.ui(finished(), port)


def test_a_tracking_server_is_pointed_at(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    record = finished()
    assert record.mlflow is not None
    record.mlflow.tracking_uri = "http://tracker:5000"
    show.ui(record)
    assert capsys.readouterr().out == "http://tracker:5000/#/experiments/7/runs/f00?workflowType=machine_learning\n"

"""What a person sees of a run."""

import io
import json
import socket
from pathlib import Path

import pytest
from rich.console import Console

from engine.reshard.ledger import Ledger
from tasks import show
from tasks.lineage import Lineage
from tasks.record import BeforeAfter, MLflowReference, RunRecord, StageRecord, Synchronisations


def ledger(received: int, load: float) -> Ledger:
    """Of 120 synchronisations in which a rank received so many bytes and loaded for so many seconds: 12 s all in all."""
    return Ledger(
        bytes_received=120 * received,
        bytes_minimum=120 * received - 120_000,
        peak_extra_bytes=2 * received,
        transfer_seconds=9.0 - load,
        load_seconds=load,
        pack_seconds=0.6,
        proof_seconds=1.8,
        wait_seconds=0.6,
        seconds=12.0,
    )


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
        synchronisations=Synchronisations(count=120, ranks=[ledger(1_000_000, 3.0), ledger(1_500_000, 9.0)]),
        model="stages/rl/model",
    )
    return RunRecord(
        run="grpo_tiny-20261129-140312",
        status="finished",
        recipe="grpo_tiny",
        seed=0,
        stages=[rl],
        final_model="/models/[x]/" + "long/" * 20 + "model",
        lineage=Lineage(configuration_digest="c", seed=0, commit="abc"),
        mlflow=MLflowReference(tracking_uri="sqlite:////db", experiment="grpo_tiny", experiment_id="7", run_id="f00"),
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
    assert stage["synchronisations"]["count"] == 120
    assert [rank["bytes_received"] for rank in stage["synchronisations"]["ranks"]] == [120_000_000, 180_000_000]


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
        "almanac show grpo_tiny-20261129-140312 --json",
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


def test_synchronisations_are_shown_by_the_time_and_the_rank() -> None:
    lines = text(finished()).splitlines()
    title = lines.index(next(line for line in lines if line.startswith("Weights, per synchronisation and rank")))
    heading = "stage times received minimum extra memory seconds transfer load pack proof wait"
    assert lines[title + 1].split() == heading.split()
    # 12 s of each rank over 120 times; of 24 s: transfer 6 + 0, load 3 + 9, pack 2 x 0.6, proof 2 x 1.8, wait 2 x 0.6.
    # Mutations: bytes of the first rank or their mean; not divided by the times; minimum for received; shares of one rank; the sum of the peaks.
    assert lines[title + 2].split() == ["rl", "120", "1.500", "MB", "1.499", "MB", "3.000", "MB", "0.100", "25", "50", "5", "15", "5"]


def test_stages_without_synchronisations_have_no_line_for_them() -> None:
    # Mutation: a block with its title and nothing in it.
    record = finished()
    record.stages.append(StageRecord(name="later", kind="rl", steps_planned=9))
    assert sum(line.startswith("later") for line in text(record).splitlines()) == 2
    for stage in record.stages:
        stage.synchronisations = None
    assert "Weights" not in text(record)


def test_a_stage_that_converged_says_after_which_step() -> None:
    # Mutation: 137/120 or 120/120 in the tables.
    record = finished()
    record.stages[0].steps, record.stages[0].steps_planned = 137, 400
    record.stages[0].ended_by, record.stages[0].ended_because = "convergence", "over the last 60 steps nothing grew"
    assert "137/400" in text(record)
    assert "rl converged after step 137: over the last 60 steps nothing grew" in text(record)
    assert "| 137 of 400, converged |" in show.note(record, "a recipe")
    record.stages[0].ended_by = "steps"
    assert "converged" not in text(record) + show.note(record, "a recipe")


@pytest.mark.parametrize(("count", "said"), [(0, "0 B"), (999, "999 B"), (1000, "1.000 kB"), (16_382_000_000, "16.382 GB")])
def test_sizes_are_in_units_of_a_thousand(count: int, said: str) -> None:
    assert show.size(count) == said


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


def test_stages_that_do_not_train_show_what_they_found_and_no_accuracy() -> None:
    record = finished()
    results = {"prompts": 4000.0, "kept": 3120.0, "pass_rate": 0.412}
    record.stages.insert(0, StageRecord(name="rate", kind="difficulty", status="finished", steps_planned=None, results=results))
    lines = text(record).splitlines()
    # What it found, and its seconds. Mutation: all stages in the table of accuracies.
    found, seconds = (line.split(None, 1)[1].strip() for line in lines if line.startswith("rate"))
    assert found == "prompts 4,000, kept 3,120, pass rate 41.2 %"
    assert set(seconds) == {"–", " "}
    assert "rate: prompts 4,000, kept 3,120, pass rate 41.2 %" in show.note(record, "what it is")
    assert "| rate |" not in show.note(record, "what it is")


def test_stages_that_lay_ready_are_named_with_the_run_that_made_them() -> None:
    record = finished()
    assert "Lay ready" not in text(record)
    record.stages[0].reused_from = "grpo_tiny-20261128-140312"
    assert "rl (as in grpo_tiny-20261128-140312)" in " ".join(text(record).split())

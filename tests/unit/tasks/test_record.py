"""The local record of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from engine.reshard.ledger import Ledger
from tasks import record, workspace
from tasks.lineage import Lineage
from tasks.record import ProcessIdentity, RunRecord, StageRecord, Synchronisations


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    return tmp_path


def make(run: str, **fields: object) -> RunRecord:
    stage = StageRecord(name="rl", kind="rl", steps_planned=2)
    return RunRecord(run=run, recipe="tiny", seed=0, lineage=Lineage(configuration_digest="c", seed=0), stages=[stage], **fields)


def dead_process() -> ProcessIdentity:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started = psutil.Process(child.pid).create_time()
    return ProcessIdentity(pid=child.pid, started=started, host=ProcessIdentity.current().host)


def test_what_is_written_is_loaded(root: Path) -> None:
    written = make("tiny-20260101-000000")
    written.stage("rl").interval = (0.25, 0.5)
    written.stage("rl").synchronisations = Synchronisations(count=2, ranks=[Ledger(bytes_received=3, load_seconds=0.5), Ledger(bytes_sent=3)])
    record.write(written)
    assert record.load("tiny-20260101-000000") == written


def test_a_record_from_before_synchronisations_were_kept_is_loaded(root: Path) -> None:
    # Mutation: no default; such a run can then not be shown any more.
    record.write(make("tiny-20260101-000000"))
    path = record.record_file("tiny-20260101-000000")
    old = json.loads(path.read_text())
    del old["stages"][0]["synchronisations"]
    path.write_text(json.dumps(old))
    assert record.load("tiny-20260101-000000").stage("rl").synchronisations is None


def test_a_failed_write_leaves_the_old_record_and_nothing_else(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation: write straight into record.json; the old record is then gone.
    written = make("tiny-20260101-000000")
    record.write(written)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    written.final_model = "never"
    with pytest.raises(OSError, match=r"free disk space.*record\.json"):
        record.write(written)
    assert record.load("tiny-20260101-000000").final_model is None
    assert sorted(path.name for path in workspace.run_directory("tiny-20260101-000000").iterdir()) == ["lineage.json", "record.json"]


def test_an_unwritable_place_is_named(root: Path) -> None:
    (root / ".work").write_text("a file where the directory should be")
    with pytest.raises(OSError, match=r"cannot write the run's record.*\.work"):
        record.write(make("tiny-20260101-000000"))


def test_an_unknown_run_names_the_nearest(root: Path) -> None:
    for second in ("01", "02"):
        record.write(make(f"tiny-20260101-0000{second}"))
    record.write(make("other-20260101-000003"))
    with pytest.raises(ValueError, match=r"unknown run 'tiny-20260101-00000'; nearest: tiny-20260101-0000"):
        record.load("tiny-20260101-00000")
    with pytest.raises(ValueError, match=r"nearest: other-20260101-000003"):
        record.load("nothing like it")


def test_without_runs_the_error_says_how_to_make_one(root: Path) -> None:
    for name in ("latest", "x", "../x"):
        with pytest.raises(ValueError, match="almanac run recipe=NAME"):
            record.load(name)


def test_a_path_is_no_run_id(root: Path) -> None:
    # Mutation: leave the check of the name out; the file outside is then read.
    outside = root / ".work" / "record.json"
    record.write(make("tiny-20260101-000000"))
    outside.write_text(make("outside").model_dump_json())
    with pytest.raises(ValueError, match=r"unknown run '\.\.'"):
        record.load("..")


def test_latest_is_the_newest_of_all_recipes(root: Path) -> None:
    # Mutation: sort by the whole name; `z` would win by its letter.
    for run in ("z_recipe-20260101-235959", "a-b-20260102-000000", "a-b-20260102-000000-2", "m-20251231-000000"):
        record.write(make(run))
    assert record.latest().run == "a-b-20260102-000000-2"
    assert record.run_ids()[-1] == "m-20251231-000000"


def test_a_run_whose_process_is_dead_is_killed(root: Path) -> None:
    # Mutation: compare the process id alone; the second record below then counts as running.
    record.write(make("dead-20260101-000000", process=dead_process()))
    mine = ProcessIdentity.current()
    record.write(make("reused-20260101-000000", process=mine.model_copy(update={"started": mine.started - 3600})))
    record.write(make("alive-20260101-000000"))
    record.write(make("away-20260101-000000", process=dead_process().model_copy(update={"host": "another-machine"})))
    statuses = {name: record.load(f"{name}-20260101-000000").status for name in ("dead", "reused", "alive", "away")}
    assert statuses == {"dead": "killed", "reused": "killed", "alive": "running", "away": "running"}
    # Showing it changes nothing.
    assert json.loads(record.record_file("dead-20260101-000000").read_text())["status"] == "running"


def test_a_finished_run_stays_finished(root: Path) -> None:
    record.write(make("done-20260101-000000", status="finished", process=dead_process()))
    assert record.load("done-20260101-000000").status == "finished"


def test_a_broken_record_is_named(root: Path) -> None:
    record.write(make("tiny-20260101-000000"))
    record.record_file("tiny-20260101-000000").write_text('{"run": "tiny-20260101-000000"}')
    with pytest.raises(ValueError, match=r"record\.json: not a run record this version can read: recipe"):
        record.load("tiny-20260101-000000")


def test_changes_are_checked() -> None:
    with pytest.raises(ValidationError):
        make("x").status = "perhaps"  # type: ignore[assignment]
    with pytest.raises(ValidationError):
        StageRecord(name="rl", kind="rl", steps_planned=2, acuracy=1)  # type: ignore[call-arg]


def test_run_ids_differ_within_a_second(root: Path) -> None:
    ids = []
    for _ in range(3):
        ids.append(record.new_run_id("tiny"))
        record.write(make(ids[-1]))
    assert len(set(ids)) == 3
    assert all(run.startswith("tiny-2") for run in ids)

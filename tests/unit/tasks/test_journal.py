"""The event log: what is read is what was written, whatever happened to the writer."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.events import EvaluationProgressed, SamplesGenerated, StageFinished, StageStarted, StepFinished, UpdatesSkipped, WeightsSynchronised
from engine.reshard.ledger import Ledger
from engine.statistics import Interval
from tasks import journal
from tasks.accuracy import Accuracy
from tasks.journal import DatasetUsed, EvaluationFinished, FileSaved, ModelSaved, RunFinished, RunStarted

HALF = Interval(mean=0.5, low=0.25, high=0.75)
ACCURACY = Accuracy(samples_per_prompt=8, prompts=3, average=HALF, greedy=HALF, average_by_difficulty={"2": HALF}, greedy_by_difficulty={"2": HALF})
ROW = {"sample_id": "rl/1/a/0", "prompt": "1+1", "response": "é\n\u2028", "reward": 1.0, "response_tokens": 3, "finished": True}
EVENTS = [
    RunStarted(run="r", recipe="tiny", description="d", configuration={"stages": {"rl": {"steps": 2}}}, lineage={"seed": 0}, tags={"a": "b"}),
    DatasetUsed(name="sums", digest="d", rows=3, context="test", source="test.parquet", used_by=["evaluation"]),
    EvaluationFinished(label="base", stage=None, trained_steps=0, accuracy=ACCURACY, seconds=1.5, tokens=7, rows=[ROW]),
    StageStarted(stage="rl", kind="rl", steps=2),
    StepFinished(stage="rl", step=1, metrics={"reward/mean": 0.1, "policy/loss": math.inf}),
    UpdatesSkipped(stage="rl", step=1, trained="policy", updates=2, directory="skipped/rl/step_000001/policy"),
    SamplesGenerated(stage="rl", step=1, rows=[ROW]),
    WeightsSynchronised(stage="rl", step=1, version=2, ranks=[Ledger(bytes_received=10, seconds=0.1), Ledger()]),
    EvaluationProgressed(label="rl", done=1, total=2),
    StageFinished(stage="rl", steps=2, seconds=3.0),
    ModelSaved(stage="rl", step=2, directory="model"),
    FileSaved(stage=None, file="reward.png", folder="plots"),
    RunFinished(status="FAILED", reason="ValueError: x", summary={"stages": []}, lineage={"seed": 0}, note="| a |"),
]


def test_every_event_comes_back_as_it_was(tmp_path: Path) -> None:
    # Mutation: leave a class out of the table of types; its line cannot be read.
    path = tmp_path / "events.jsonl"
    for time_ms, event in enumerate(EVENTS):
        journal.append(path, event, time_ms)
    assert journal.read_events(path) == EVENTS
    assert [entry.time_ms for entry in journal.read(path)] == list(range(len(EVENTS)))
    # Other programs can read it too.
    assert all(json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())


@given(value=st.floats(width=64), name=st.text(min_size=1, max_size=20))
def test_any_metric_comes_back(value: float, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    journal.append(path, StepFinished(stage="rl", step=1, metrics={name: value}), 0)
    [event] = journal.read_events(path)
    assert isinstance(event, StepFinished)
    assert event.metrics[name] == value or (math.isnan(event.metrics[name]) and math.isnan(value))


def test_reading_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal.append(path, EVENTS[0], 0)
    [first] = journal.read(path)
    assert list(journal.read(path, first.end)) == []
    journal.append(path, EVENTS[1], 0)
    assert [entry.event for entry in journal.read(path, first.end)] == [EVENTS[1]]


def test_half_a_line_is_not_an_event(tmp_path: Path) -> None:
    # Mutation: parse the last line whether or not it ends.
    path = tmp_path / "events.jsonl"
    journal.append(path, EVENTS[0], 0)
    with path.open("a") as file:
        file.write('{"type": "StepFin')
    assert journal.read_events(path) == EVENTS[:1]


def test_a_synchronisation_without_ledgers_can_be_read(tmp_path: Path) -> None:
    """Runs from before they were kept still have their pictures drawn. Mutation: no default for `ranks`."""
    path = tmp_path / "events.jsonl"
    fields = {"stage": "rl", "step": 1, "version": 2, "seconds": 0.1, "bytes_received": 10}
    path.write_text(json.dumps({"type": "WeightsSynchronised", "time_ms": 0, **fields}) + "\n")
    assert journal.read_events(path) == [WeightsSynchronised(stage="rl", step=1, version=2)]


def test_a_strange_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal.append(path, EVENTS[0], 0)
    with path.open("a") as file:
        file.write('{"type": "Earthquake", "time_ms": 0}\n')
    with pytest.raises(ValueError, match=r"events\.jsonl, line 2: not an event this version can read"):
        journal.read_events(path)


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cannot write the run's event log.*events\.jsonl"):
        journal.append(tmp_path / "missing" / "events.jsonl", EVENTS[0], 0)

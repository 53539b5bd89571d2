"""What came out of runs: their events, those of stages that lay ready included, the last value of each metric, and two runs side by side."""

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine.events import SamplesGenerated, StageFinished, StageStarted, StepFinished, WeightsSynchronised
from tasks import differences, journal, outputs, record, workspace
from tasks.curves import OF_THE_MACHINE
from tasks.differences import Change, Differences
from tasks.journal import LoggedEvent
from tasks.outputs import DamagedOutputError
from tasks.record import RunRecord, StageRecord
from tasks.show import gain, percent

OF_STAGES = StageStarted | StepFinished | SamplesGenerated | WeightsSynchronised | StageFinished
MEASURED = ("accuracy_before", "interval_before", "accuracy_after", "interval", "greedy_after", "gain", "gain_interval", "steps", "seconds")
LETTERS = ("A", "B")
"""The runs, on the terminal."""
DIGEST_DIGITS, WIDEST = 16, 44
"""Characters of a digest and of another value on the terminal, at most."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run with what it logged."""

    record: RunRecord
    events: list[LoggedEvent]
    """Its own, and before them the training of stages that it did not run again, where the runs that made them still have theirs."""

    @classmethod
    def of(cls, run: RunRecord) -> "Outcome":
        """Reads the event logs."""
        events: list[LoggedEvent] = []
        for stage in run.stages:
            if stage.reused_from is not None:
                events += [event for event in _logged(stage.reused_from) if isinstance(event, OF_STAGES) and event.stage == stage.name]
        return cls(run, [*events, *_logged(run.run)])

    def last_metrics(self) -> dict[str, dict[str, float]]:
        """By stage, of its last step; of a stage whose log is gone, as its output has them."""
        found: dict[str, dict[str, float]] = {}
        for event in self.events:
            if isinstance(event, StepFinished):
                found[event.stage] = dict(event.metrics)
        for stage in self.record.stages:
            if stage.name not in found and stage.output is not None:
                with suppress(DamagedOutputError):
                    made = outputs.read(Path(stage.output))
                    found |= {stage.name: dict(made.metrics)} if made is not None else {}
        return found


def _logged(run: str) -> Iterable[LoggedEvent]:
    """A run's events; none where its log is gone, or is of another version."""
    path = workspace.run_directory(run) / "events.jsonl"
    try:
        return journal.read_events(path) if path.is_file() else []
    except ValueError:
        return []


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs side by side."""

    then: Outcome
    now: Outcome
    differences: Differences

    @classmethod
    def of(cls, then: str, now: str) -> "Pair":
        """Of two run ids. Raises ValueError where a run is unknown; names the nearest."""
        one, other = record.load(then), record.load(now)
        return cls(Outcome.of(one), Outcome.of(other), differences.between(one.lineage, other.lineage))

    def stages(self) -> list[tuple[str, StageRecord | None, StageRecord | None]]:
        """All stages by name, in order, as each run has them."""
        one, other = ({stage.name: stage for stage in run.record.stages} for run in (self.then, self.now))
        return [(name, one.get(name), other.get(name)) for name in dict.fromkeys([*one, *other])]

    def metrics(self) -> list[tuple[str, str, float | None, float | None]]:
        """(stage, metric, then, now): last values, all of them."""
        one, other = self.then.last_metrics(), self.now.last_metrics()
        rows = []
        for stage in dict.fromkeys([*one, *other]):
            before, after = one.get(stage, {}), other.get(stage, {})
            rows += [(stage, metric, before.get(metric), after.get(metric)) for metric in dict.fromkeys([*before, *after])]
        return rows

    def summary(self) -> dict[str, Any]:
        """As JSON values: `almanac diff --json`."""
        found = self.differences
        return {
            "runs": [self.then.record.run, self.now.record.run],
            "differences": {
                **{part: [{"what": what, "then": then, "now": now} for what, then, now in changes] for part, changes in found.parts().items()},
                "commits": found.commits,
                "commits_gone": found.commits_gone,
            },
            "stages": {name: {"then": _measured(then), "now": _measured(now)} for name, then, now in self.stages()},
            "last_metrics": [
                {"stage": stage, "metric": metric, "then": _finite(then), "now": _finite(now)} for stage, metric, then, now in self.metrics()
            ],
        }

    def table(self) -> RenderableType:
        """For the terminal, in 100 columns where names allow it."""
        runs = zip(LETTERS, (self.then.record, self.now.record), strict=True)
        parts: list[RenderableType] = [Text.assemble((letter, "bold"), f"  {run.run}  {run.status}, seed {run.seed}") for letter, run in runs]
        parts += ["", _accuracies(self.stages()), "", _last(self.metrics())]
        for part, changes in self.differences.parts().items():
            parts += ["", _changes(part, changes)]
            if part == "code":
                for sign, commits in (("+", self.differences.commits), ("-", self.differences.commits_gone)):
                    parts += [Text(f"{sign} {commit}", "dim") for commit in commits]
        return Group(*parts)


def _measured(stage: StageRecord | None) -> dict[str, Any] | None:
    return None if stage is None else {name: getattr(stage, name) for name in MEASURED}


def _grid(title: str, *columns: str) -> Table:
    grid = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold")
    for column in columns:
        grid.add_column(column, overflow="fold")
    return grid


def _accuracies(stages: Iterable[tuple[str, StageRecord | None, StageRecord | None]]) -> Table:
    grid = _grid("Accuracy on the test set, % [interval]", "stage", "run", "before", "after", "gain", "greedy")
    for name, *pair in stages:
        for letter, stage in zip(LETTERS, pair, strict=True):
            if stage is not None and (stage.accuracy_before is not None or stage.accuracy_after is not None):
                before, after = percent(stage.accuracy_before, stage.interval_before), percent(stage.accuracy_after, stage.interval)
                grid.add_row(name, letter, before, after, gain(stage), percent(stage.greedy_after))
    return grid


def _last(metrics: Iterable[tuple[str, str, float | None, float | None]]) -> Table:
    grid = _grid("Last step", "stage", "metric", *LETTERS)
    for stage, metric, then, now in metrics:
        if not metric.startswith(OF_THE_MACHINE):
            grid.add_row(stage, metric, _number(then), _number(now))
    return grid


def _changes(part: str, changes: Iterable[Change]) -> RenderableType:
    rows = list(changes)
    if not rows:
        return Text.assemble((part.capitalize(), "bold"), "  the same")
    grid = _grid(part.capitalize(), "what", *LETTERS)
    for what, then, now in rows:
        grid.add_row(what, _short(then), _short(now))
    return grid


def _finite(value: float | None) -> float | str | None:
    """JSON has no NaN and no infinity."""
    return value if value is None or math.isfinite(value) else str(value)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.5g}"


def _short(value: str) -> str:
    """Digests by their beginning, other values as far as there is room."""
    if len(value) in (40, 64) and set(value) <= set("0123456789abcdef"):
        return value[:DIGEST_DIGITS]
    return value if len(value) <= WIDEST else f"{value[: WIDEST - 1]}…"

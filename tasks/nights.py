"""The record of nights: what ran, what came out, and what had changed since the last good one. One directory each under `.work/nightly`."""

import math
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from tasks import checkout, journal, reference, workspace
from tasks.comparison import Night, Verdict, Words, compare
from tasks.config import RecipeConfig
from tasks.curves import Summary, curves, summary
from tasks.lineage import PATCH, Lineage, resolve
from tasks.record import RunRecord, StageRecord, now
from tasks.reference import Reference, Stored

RECORD = "verdict.json"
REPORT = "report.html"
SECOND = "%Y%m%d-%H%M%S"
"""The id of a night, as a time in UTC."""


class RecipeNight(Stored):
    """One recipe in one night."""

    name: str
    """Of its reference."""
    outcome: Literal["finished", "stopped", "failed", "not started"]
    """`stopped`: when the budget was spent. `not started`: less was left of it than a run takes."""
    reason: str | None
    """Why it failed or was not started."""
    run: str | None
    seed: int
    seconds: float
    reference_digest: str
    lineage: Lineage
    """Of the run; where it has no record, as far as it is known without one."""
    stages: list[StageRecord]
    summary: Summary
    """Of the metrics that the reference has."""
    verdicts: list[Verdict]

    @property
    def word(self) -> Words:
        """The worst that is said of any metric; a failed run is worse than all of the reference's."""
        words = {verdict.verdict for verdict in self.verdicts}
        order: tuple[Words, ...] = ("worse", "insufficient", "better", "within")
        return "worse" if self.outcome == "failed" else next((word for word in order if word in words), "insufficient")

    def why(self) -> list[str]:
        """What a person should know beside the word, a line each: why it failed or was not started, and each metric that is worse."""
        worse = [f"{v.stage} {v.metric} ({v.statistic} {v.statistic_deviation:+.1f} sd)" for v in self.verdicts if v.verdict == "worse"]
        return [*([self.reason] if self.reason else []), *worse]


class NightRecord(Stored):
    """One night."""

    night: str
    """Its UTC second, such as 20261130-020000."""
    finished: str
    """ISO 8601, UTC."""
    budget_seconds: float
    commit: str | None
    uncommitted: bool | None
    recipes: list[RecipeNight]

    @property
    def worse(self) -> bool:
        """Whether anything is."""
        return any(recipe.word == "worse" for recipe in self.recipes)


def directory(night: str) -> Path:
    """Where the record, the report and the logs of a night lie."""
    return workspace.work_directory() / "nightly" / night


def new_night() -> tuple[str, int]:
    """Id of a night that begins now, and the seed of its runs: seconds since 1970, which no night has had before."""
    night = f"{datetime.now(UTC):{SECOND}}"
    return night, seed(night)


def seed(night: str) -> int:
    """Of the runs of a night."""
    return int(datetime.strptime(night, SECOND).replace(tzinfo=UTC).timestamp())


def judged(
    night: str,
    known: Reference,
    config: RecipeConfig,
    outcome: Literal["finished", "stopped", "failed"],
    run: RunRecord | None,
    reason: str | None,
    seconds: float,
) -> RecipeNight:
    """What a run says beside its reference and the nights before; one that ended early is judged as far as it came."""
    events = workspace.run_directory(run.run) / "events.jsonl" if run is not None else None
    found = summary(curves(journal.read_events(events))) if events is not None and events.exists() else {}
    identity = reference.digest(known)
    return RecipeNight(
        name=known.name,
        outcome=outcome,
        reason=reason,
        run=None if run is None else run.run,
        seed=config.seed,
        seconds=seconds,
        reference_digest=identity,
        lineage=resolve(config) if run is None else run.lineage,
        stages=[] if run is None else run.stages,
        summary={
            stage: {name: series for name, series in metrics.items() if name in known.series().get(stage, {})} for stage, metrics in found.items()
        },
        verdicts=compare(known.series(), found, past(known.name, identity, before=night)),
    )


def not_started(known: Reference, config: RecipeConfig, reason: str) -> RecipeNight:
    """Of a recipe whose run would take longer than what is left of the budget."""
    return RecipeNight(
        name=known.name,
        outcome="not started",
        reason=reason,
        run=None,
        seed=config.seed,
        seconds=0.0,
        reference_digest=reference.digest(known),
        lineage=resolve(config),
        stages=[],
        summary={},
        verdicts=compare(known.series(), {}),
    )


def record(night: str, budget_seconds: float, recipes: Sequence[RecipeNight]) -> NightRecord:
    """Writes the night's record, and beside it what the code had beyond its commit."""
    found = NightRecord(
        night=night,
        finished=now(),
        budget_seconds=budget_seconds,
        commit=checkout.commit(),
        uncommitted=checkout.uncommitted(),
        recipes=list(recipes),
    )
    path = directory(night) / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    beyond = checkout.patch()
    (path.parent / PATCH).write_bytes(b"" if beyond is None else beyond.text)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(found.model_dump_json(indent=1) + "\n")
    beside.replace(path)
    return found


def nights() -> Iterator[NightRecord]:
    """All nights that have a record this version can read, newest first."""
    for path in sorted((workspace.work_directory() / "nightly").glob(f"*/{RECORD}"), reverse=True):
        try:
            yield NightRecord.model_validate_json(path.read_text())
        except ValidationError:
            continue


def past(name: str, reference_digest: str, before: str) -> list[Night]:
    """The nights before `before` in which a recipe was compared with this reference and did not fail, oldest first, as `compare` takes them."""
    found = []
    for night in nights():
        for recipe in night.recipes if night.night < before else []:
            if (recipe.name, recipe.reference_digest) == (name, reference_digest) and recipe.outcome in ("finished", "stopped"):
                found.append(Night(recipe.summary, frozenset((v.stage, v.metric) for v in recipe.verdicts if v.verdict == "within")))
    return found[::-1]


def last_good(name: str, before: str) -> tuple[NightRecord, RecipeNight] | None:
    """The newest night before `before` in which the recipe ran to its end and nothing of it was worse."""
    for night in nights():
        for recipe in night.recipes:
            if night.night < before and recipe.name == name and recipe.outcome == "finished" and recipe.word != "worse":
                return night, recipe
    return None


def expected_seconds(known: Reference) -> float:
    """Of a run, by the reference; 0 where that does not say."""
    return 0.0 if math.isnan(known.seconds) else known.seconds

"""The record of nights: what ran, what came out, and what had changed since the last good one. One directory each under `.work/nightly`."""

import math
import os
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from tasks import checkout, journal, reference, workspace
from tasks.comparison import Night, Verdict, Words, compare
from tasks.config import RecipeConfig
from tasks.curves import Series, Summary, curves, summary
from tasks.lineage import PATCH, Lineage, resolve
from tasks.progress import BASE
from tasks.record import RunRecord, StageRecord, now
from tasks.reference import Reference, Stored

RECORD = "verdict.json"
REPORT = "report.html"
SECOND = "%Y%m%d-%H%M%S"
"""The id of a night, as a time in UTC."""


class Part(Stored):
    """What a night runs of a recipe that takes several nights (`tasks/rounds.py`)."""

    begun: str
    """The night in which this round of the recipe began, whose seed it has."""
    stages: list[str]
    """That are to be run, in order."""
    number: int
    """From 1."""
    of: int

    @property
    def until(self) -> str:
        """The stage that it ends with."""
        return self.stages[-1]


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
    part: Part | None = None
    """None: the whole recipe."""

    @property
    def how(self) -> str:
        """How the run ended, and which part of the recipe it was."""
        return self.outcome if self.part is None else f"{self.outcome}, part {self.part.number} of {self.part.of} (to {self.part.until})"

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


def new_night() -> str:
    """Id of a night that begins now."""
    return f"{datetime.now(UTC):{SECOND}}"


def seed(night: str) -> int:
    """Of the runs of a night: seconds since 1970, which no night has had before."""
    return int(datetime.strptime(night, SECOND).replace(tzinfo=UTC).timestamp())


def judged(
    night: str,
    known: Reference,
    config: RecipeConfig,
    outcome: Literal["finished", "stopped", "failed"],
    run: RunRecord | None,
    reason: str | None,
    seconds: float,
    part: Part | None = None,
) -> RecipeNight:
    """What a run says beside its reference and the nights before; one that ended early is judged as far as it came.

    Of a part, the stages are judged that the night was to run, and others that it had to make again.
    """
    events = workspace.run_directory(run.run) / "events.jsonl" if run is not None else None
    found = summary(curves(journal.read_events(events))) if events is not None and events.exists() else {}
    made = [] if run is None else [stage.name for stage in run.stages if stage.status != "planned" and stage.reused_from is None]
    series, identity = _series(known, part, made), reference.digest(known)
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
            stage: {name: curve for name, curve in metrics.items() if name in series[stage]} for stage, metrics in found.items() if stage in series
        },
        verdicts=compare(series, found, past(known.name, identity, before=night, stages=series)),
        part=part,
    )


def not_started(known: Reference, config: RecipeConfig, reason: str, part: Part | None = None) -> RecipeNight:
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
        verdicts=compare(_series(known, part), {}),
        part=part,
    )


def _series(known: Reference, part: Part | None, made: Sequence[str] = ()) -> dict[str, dict[str, list[Series]]]:
    """What a night is compared with: of a part, its stages and those that it `made` anyway, and with the first one the weights at the start."""
    if part is None:
        return known.series()
    wanted = {*part.stages, *made} | ({BASE} if part.number == 1 else set())
    return {stage: metrics for stage, metrics in known.series().items() if stage in wanted}


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


def past(name: str, reference_digest: str, before: str, stages: Collection[str]) -> list[Night]:
    """The nights before `before` that compared any of these stages with this reference and did not fail, oldest first, as `compare` takes them."""
    found = []
    for night in nights():
        for recipe in night.recipes if night.night < before else []:
            same = (recipe.name, recipe.reference_digest) == (name, reference_digest) and recipe.outcome in ("finished", "stopped")
            if same and any(stage in recipe.summary for stage in stages):
                found.append(Night(recipe.summary, frozenset((v.stage, v.metric) for v in recipe.verdicts if v.verdict == "within")))
    return found[::-1]


def last_good(name: str, before: str, part: Part | None) -> tuple[NightRecord, RecipeNight] | None:
    """The newest night before `before` in which the recipe, or the same part of it, ran to its end and nothing of it was worse."""
    for night in nights():
        for recipe in night.recipes:
            same = recipe.name == name and (recipe.part and recipe.part.stages) == (part and part.stages)
            if same and night.night < before and recipe.outcome == "finished" and recipe.word != "worse":
                return night, recipe
    return None


def expected_seconds(known: Reference, part: Part | None = None) -> float:
    """Of a run, or of a part of it, by the reference; 0 where that does not say."""
    if math.isnan(known.seconds):
        return 0.0
    by_stage = {name: sum(stage.seconds_by_phase.values()) for name, stage in known.stages.items()}
    whole = sum(by_stage.values())
    if part is None or whole == 0:
        return known.seconds
    # What belongs to no stage, the start and evaluations, is taken to be spread as the stages' seconds are.
    return known.seconds * sum(by_stage.get(name, 0.0) for name in part.stages) / whole

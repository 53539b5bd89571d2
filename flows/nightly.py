"""The nightly flow: recipes run under a budget of seconds, judged beside their references, and told in one page."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from prefect import flow, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from flows import artifacts, child_run
from flows.nightly_plan import Planned, planned, references_for
from flows.parameters import DevicePool, Seconds
from flows.watch import Watcher, in_turn, unwatched, watcher
from tasks import night_report, nights, page, workspace
from tasks.nights import NightRecord, RecipeNight
from tasks.progress import Listener, Notice, PhaseFinished, PhaseStarted

RESERVE = 0.02
"""Of the budget, kept so that a run that is stopped has time to write its records."""
LATEST = timedelta(hours=12)
"""A night that could not begin for so long is not made up for: after some days without a worker, one night is run and not all of them."""


class WorseError(RuntimeError):
    """Something is worse than its reference; has the night's record."""

    def __init__(self, record: NightRecord) -> None:
        names = ", ".join(recipe.name for recipe in record.recipes if recipe.word == "worse")
        super().__init__(f"worse than its reference: {names}; see {page_of(record)}")
        self.record = record


def page_of(record: NightRecord) -> Path:
    """Where the report of a night lies."""
    return nights.directory(record.night) / nights.REPORT


@task(name="judge", task_run_name="judge {name}", cache_policy=NO_CACHE)
def run_and_judge(night: str, name: str, planned: Planned, seconds: float) -> RecipeNight:
    """One recipe, run for so many seconds at most, and compared with its reference. A run that fails is a verdict, no error."""
    part, expected = planned.part, nights.expected_seconds(planned.reference, planned.part)
    if expected > seconds:
        reason = f"{'a run' if part is None else 'it'} takes {expected:.0f} s, by the reference, and {max(0.0, seconds):.0f} s of the budget are left"
        return nights.not_started(planned.reference, planned.config, reason, part)
    # It reports to the night's own server (PREFECT_API_URL), so that Prefect's pages show them together.
    # What earlier nights of the round have left is taken.
    fresh, until = part is None or part.begun == night, None if part is None else part.until
    outcome = child_run.run(planned.overrides, nights.directory(night) / f"{name}.log", seconds=seconds, fresh=fresh, until=until)
    return nights.judged(night, planned.reference, planned.config, outcome.status, outcome.record, outcome.reason, outcome.seconds, part)


@flow(name="nightly", flow_run_name="nightly")
def nightly(budget_seconds: Seconds, names: tuple[str, ...] = (), devices: DevicePool = "cpu", next_stage: bool = False) -> NightRecord | State[Any]:
    """All recipes in the order given, their verdicts, and the page. Returns the night's record, or that it was due too long ago.

    Args:
        budget_seconds: how many seconds all runs together may take.
        names: references to run (`almanac reference list`); none: all whose recipes are for `devices`.
        devices: which recipes to run where no names are given.
        next_stage: of each recipe its next stage that trains, with what stands before it, and not all; after the last one the next round begins.

    Raises:
        ConfigurationError: a recipe cannot be run or judged; all that is wrong with any of them.
        WorseError: something is worse.
    """
    due = runtime.flow_run.scheduled_start_time
    if watcher() is None and is_too_late(due, datetime.now(UTC)):
        return Cancelled(message=f"was due {due:%Y-%m-%d %H:%M} UTC, more than {LATEST.total_seconds() / 3600:.0f} hours ago")
    names = names or references_for(devices)
    with _night(names) as who:
        recipes, warnings = planned(names, who.name, budget_seconds, next_stage=next_stage)
        for warning in warnings:
            who.listener(Notice(text=warning))
        record = _judged(who.name, recipes, budget_seconds, who.listener)
    artifacts.night_verdict(record, str(page_of(record)))
    if record.worse:
        raise WorseError(record)
    return record


def is_too_late(due: datetime, now: datetime) -> bool:
    """Whether a night that was due then is not run any more."""
    return now - due > LATEST


@contextmanager
def _night(names: Sequence[str]) -> Iterator[Watcher]:
    """Who watches, or else a night of its own, once no other run is on."""
    if (who := watcher()) is not None:
        yield who
        return
    workspace.quiet_environment()
    night = nights.new_night()
    with in_turn(night, keep=False), unwatched(night, nights.directory(night) / "almanac.log", names) as display:
        yield Watcher(night, display.show)


def _judged(night: str, recipes: Sequence[Planned], budget_seconds: float, listener: Listener) -> NightRecord:
    end = time.monotonic() + budget_seconds * (1 - RESERVE)
    found: list[RecipeNight] = []
    for one in recipes:
        name = one.reference.name
        listener(PhaseStarted(phase=name))
        found.append(run_and_judge(night, name, one, end - time.monotonic()))
        listener(PhaseFinished(phase=name, result=f"{found[-1].word}" + (f", {found[-1].outcome}" if found[-1].outcome != "finished" else "")))
    record = nights.record(night, budget_seconds, found)
    # The verdict stands without its page: whoever waits for it at breakfast is told that all the same.
    with page.drawing(
        f"the page of night {night}", lambda text: listener(Notice(text=f"{text}; its numbers are in {nights.directory(night) / nights.RECORD}"))
    ):
        page.write(page_of(record), night_report.to_html(record, [one.reference for one in recipes]))
    return record

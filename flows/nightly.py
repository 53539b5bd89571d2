"""`almanac nightly`: recipes run under a budget of seconds, judged beside their references, and told in one page."""

import time
from collections.abc import Sequence
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows import child_run
from flows.nightly_plan import Planned
from tasks import night_report, nights, page
from tasks.nights import NightRecord, RecipeNight
from tasks.progress import Listener, PhaseFinished, PhaseStarted

RESERVE = 0.02
"""Of the budget, kept so that a run that is stopped has time to write its records."""


@task(name="judge", task_run_name="judge {name}", cache_policy=NO_CACHE)
def run_and_judge(night: str, name: str, planned: Planned, seconds: float) -> RecipeNight:
    """One recipe, run for so many seconds at most, and compared with its reference. A run that fails is a verdict, no error."""
    expected = nights.expected_seconds(planned.reference)
    if expected > seconds:
        reason = f"a run takes {expected:.0f} s, by the reference, and {max(0.0, seconds):.0f} s of the budget are left"
        return nights.not_started(planned.reference, planned.config, reason)
    # One server for the night and its runs, so that Prefect's pages show them together.
    from flows.prefect_server import address

    outcome = child_run.run(planned.overrides, nights.directory(night) / f"{name}.log", seconds=seconds, environment={"PREFECT_API_URL": address()})
    return nights.judged(night, planned.reference, planned.config, outcome.status, outcome.record, outcome.reason, outcome.seconds)


@flow(name="nightly", flow_run_name="{night}", validate_parameters=False)
def nightly(night: str, recipes: Sequence[Planned], budget_seconds: float, listener: Listener) -> tuple[NightRecord, Path]:
    """All recipes in the order given, their verdicts, and the page.

    Args:
        night: id that no night has yet.
        recipes: whose references were checked.
        budget_seconds: of all runs together.
        listener: is told about progress.

    Returns:
        The night's record, and the page.
    """
    end = time.monotonic() + budget_seconds * (1 - RESERVE)
    found: list[RecipeNight] = []
    for planned in recipes:
        name = planned.reference.name
        listener(PhaseStarted(phase=name))
        found.append(run_and_judge(night, name, planned, end - time.monotonic()))
        listener(PhaseFinished(phase=name, result=f"{found[-1].word}" + (f", {found[-1].outcome}" if found[-1].outcome != "finished" else "")))
    record = nights.record(night, budget_seconds, found)
    path = nights.directory(night) / nights.REPORT
    page.write(path, night_report.to_html(record, [planned.reference for planned in recipes]))
    return record, path

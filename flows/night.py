"""What stands around the nightly flow when a person or a scheduler starts it from a terminal."""

import os
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from flows.nightly_plan import planned
from flows.run import observed
from tasks import nights
from tasks.nights import NightRecord
from tasks.progress import START_PREFECT, PhaseFinished, PhaseStarted

COLOURS = {"worse": "bold red", "better": "green", "within": "", "insufficient": "yellow"}


def night(names: Sequence[str], budget_seconds: float, *, next_stage: bool) -> int:
    """A whole night. Returns 0 only if nothing is worse.

    Args:
        names: of references.
        budget_seconds: of all runs together.
        next_stage: of each recipe its next part, and not all of it.

    Raises:
        ConfigurationError: a recipe cannot be run or judged; all that is wrong with any of them.
    """
    name = nights.new_night()
    # The flow asks again; a person at a terminal hears before Prefect has started.
    planned(names, name, budget_seconds, next_stage=next_stage)
    with observed(nights.directory(name) / "almanac.log", f"night {name}", [START_PREFECT, *names]) as display:
        display.show(PhaseStarted(phase=START_PREFECT))
        from flows.prefect_server import start_server

        server = start_server()
        from flows.nightly import WorseError, nightly, page_of
        from flows.watch import watched

        server.wait()
        display.show(PhaseFinished(phase=START_PREFECT, result=server.api))
        try:
            with watched(name, display.show):
                record = nightly(budget_seconds, tuple(names), next_stage=next_stage)
        except WorseError as worse:
            record = worse.record
        assert isinstance(record, NightRecord), "only a worker comes too late"
        display.close(Group(_table(record), "", f"report: {os.path.relpath(page_of(record))}"))
    return 1 if record.worse else 0


def _table(record: NightRecord) -> Table:
    """A line for each recipe, and one for each of its metrics that is worse."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("recipe", "verdict", "run", "what"):
        table.add_column(column)
    for recipe in record.recipes:
        table.add_row(recipe.name, Text(recipe.word, COLOURS[recipe.word]), recipe.how, "\n".join(recipe.why()))
    return table

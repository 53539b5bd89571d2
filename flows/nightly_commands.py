"""`almanac nightly` and `almanac reference`: their arguments, and what they print."""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from flows.terminal import plain_console


def add(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds both verbs by the command's own `verb`."""
    night = verb("nightly", nightly, "run recipes under a budget, and judge them beside their references; 0 only if nothing is worse")
    night.add_argument("names", nargs="+", metavar="NAME", help="of references: `almanac reference list`")
    night.add_argument("--budget-seconds", type=float, required=True, metavar="N", help="of all runs together")
    night.add_argument("--next-stage", action="store_true", help="of each recipe its next stage that trains, and not all: docs/nightly.md")
    references = verb("reference", show_reference, "how a recipe comes out when nothing is wrong")
    actions = references.add_subparsers(title="actions", metavar="ACTION", required=True)
    made = actions.add_parser("make", help="run a recipe with several seeds, or go on with that")
    made.add_argument("recipe", metavar="RECIPE", help="file in conf/recipe")
    made.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings in Hydra's grammar; name=NAME names the reference of a changed recipe"
    )
    made.add_argument("--seeds", type=int, default=8, metavar="N", help="at least 5 (default 8)")
    made.set_defaults(command=make_reference)
    actions.add_parser("list", help="all references").set_defaults(command=list_references)
    shown = actions.add_parser("show", help="one reference")
    shown.add_argument("name", metavar="NAME")
    shown.set_defaults(command=show_reference)


def nightly(arguments: argparse.Namespace) -> int:
    """`almanac nightly`: 1 when something is worse."""
    from flows.night import night

    return night(arguments.names, arguments.budget_seconds, next_stage=arguments.next_stage)


def make_reference(arguments: argparse.Namespace) -> int:
    """`almanac reference make`."""
    from flows import reference

    reference.make(arguments.recipe, arguments.seeds, arguments.overrides)
    return 0


def list_references(arguments: argparse.Namespace) -> int:
    """`almanac reference list`."""
    from tasks import reference

    rows = [reference.load(name) for name in reference.known()]
    columns = ("name", "recipe", "seeds", "seconds a run", "made", "commit", "configuration")
    cells = [
        (r.name, r.recipe, str(len(r.seeds)), f"{r.seconds:.0f}", r.date[:10], (r.commit or "unknown")[:12], r.configuration_hash[:12]) for r in rows
    ]
    plain_console().print(_table(columns, cells) if rows else "there is no reference yet: `almanac reference make RECIPE` makes one")
    return 0


def show_reference(arguments: argparse.Namespace) -> int:
    """`almanac reference show`."""
    from tasks import reference
    from tasks.comparison import JUDGED

    found, console = reference.load(arguments.name), plain_console()
    facts: dict[str, Any] = {
        "recipe": " ".join([found.recipe, *found.overrides]),
        "configuration": found.configuration_hash,
        "commit": (found.commit or "unknown") + (", with uncommitted changes" if found.uncommitted else ""),
        "made": found.date,
        "packages": found.lock_digest,
        "seeds": ", ".join(map(str, found.seeds)),
        "seconds a run": f"{found.seconds:.0f}",
    }
    for key, value in facts.items():
        console.print(f"{key:<14} {value}")
    rows = [
        (
            stage,
            metric,
            f"{curve.mean[0]:.4g}",
            f"{curve.mean[-1]:.4g}",
            f"{curve.spread[-1]:.2g}",
            str(curve.n[-1]),
            "yes" if metric in JUDGED else "",
        )
        for stage, known in found.stages.items()
        for metric, curve in known.metrics.items()
        if not math.isnan(curve.mean[-1])
    ]
    console.print("", _table(("stage", "metric", "first window", "last window", "spread", "n", "judged"), rows))
    return 0


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table

"""The names of metrics that docs/tracking.md promises."""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "tracking.md"
ANYTHING = {"NAME": "[a-z0-9_]+", "PHASE": "[a-z_]+", "D": ".+", "avg_at_8": "avg_at_[0-9]+"}
"""What stands in a documented name for something else."""


def documented() -> set[str]:
    """Names in the tables of steps and of evaluations, as they are written there."""
    section = PAGE.read_text().partition("### Metrics")[2].partition("Parent, when the run ends")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    names = re.findall(r"`([a-z_]+/[A-Za-z0-9_/]+)`", "\n".join(rows))
    return {name for name in names if not name.startswith("docs/")}


def pattern(name: str) -> re.Pattern[str]:
    """That names of runs match."""
    return re.compile("".join(ANYTHING.get(part, re.escape(part)) for part in re.split(r"(NAME|PHASE|\bD\b|avg_at_8)", name)))


def undocumented(names: Iterable[str]) -> list[str]:
    """Those of these names that the page does not have."""
    known = [pattern(name) for name in documented()]
    return sorted({name for name in names if not any(one.fullmatch(name) for one in known)})

"""What the benchmarks share: which code was measured, a table, and the two files of results."""

import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


OF_RUNS = (":(exclude)dvc.lock", ":(exclude)results")
"""What runs bring up to date themselves is no code."""


def commit() -> str:
    """The code's commit, with `-dirty` where it differs from that."""
    dirty = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *OF_RUNS)
    return _git("rev-parse", "HEAD") + ("-dirty" if dirty else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def table(header: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """A Markdown table; the first `words` columns are words and stand left, the others are numbers and stand right."""
    marks = ["---" if column < words else "---:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (header, marks, *rows))


def write(name: str, results: Any, page: str) -> None:
    """docs/results/NAME.json and NAME.md, and the page on the screen."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")
    (RESULTS / f"{name}.md").write_text(page)
    print(page)

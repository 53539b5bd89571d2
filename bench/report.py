"""What the benchmarks share: which code was measured, what was measured before, a table, and the two files of results."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
ALMANAC = Path(sys.executable).with_name("almanac")


def commit() -> str:
    """The code's commit, with `-dirty` where it differs from that."""
    # Here, because reference libraries are asked in an environment of their own, by scripts that need the paths alone.
    from tasks import checkout

    changed = checkout.git("status", "--porcelain", "--untracked-files=no", *checkout.CODE)
    return f"{checkout.commit()}{'-dirty' if changed else ''}"


def once(bench: str, name: str, measure: Callable[[], Any]) -> Any:
    """What `measure` gives, or gave before with this commit; kept under .work/bench, so that an interrupted benchmark goes on where it was."""
    from tasks.workspace import work_directory

    code = commit()
    path = work_directory() / "bench" / f"{bench}-{code}" / f"{name}.json"
    if not path.exists() or code.endswith("-dirty"):
        print(f"== {name}", flush=True)
        found = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def newest() -> dict[str, Any]:
    """What `almanac show` says of the newest run."""
    shown = subprocess.run([ALMANAC, "show", "latest", "--json"], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return dict(json.loads(shown))


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

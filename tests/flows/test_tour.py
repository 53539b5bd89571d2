"""docs/tour.md, command by command: each has the exit code that the page says, and prints what stands below it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tasks.workspace import checkout

PAGE = checkout() / "docs" / "tour.md"
EXIT_CODE = re.compile(r"\s+# exit code (\d+)$")


@dataclass
class Step:
    """One command of the page."""

    command: str
    code: int = 0
    said: list[str] = field(default_factory=list)
    """Lines below it, `...` for anything."""


def steps(page: str) -> Iterator[Step]:
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        step: Step | None = None
        for line in block.splitlines():
            if line.startswith("$ "):
                if step is not None:
                    yield step
                found = EXIT_CODE.search(line)
                step = Step(EXIT_CODE.sub("", line[2:]), int(found[1]) if found else 0)
            else:
                assert step is not None, f"{line!r} stands below no command"
                step.said.append(line)
        if step is not None:
            yield step


def missing(said: list[str], printed: str) -> list[str]:
    """Lines of the page that do not stand in what was printed, in this order."""
    lines, left = printed.splitlines(), []
    place = 0
    for expected in said:
        pattern = re.compile(".*".join(re.escape(part) for part in expected.split("...")))
        found = next((number for number in range(place, len(lines)) if pattern.fullmatch(lines[number])), None)
        if found is None:
            left.append(expected)
        else:
            place = found + 1
    return left


def test_lines_are_missed_and_found() -> None:
    # Mutations: accept any order; take a line for a part of another.
    assert missing(["...b...", "c"], "a b c\nc") == []
    assert missing(["c", "...b..."], "a b c\nc") == ["...b..."]
    assert missing(["a"], "ab") == ["a"]


def test_the_page_shows_what_it_should() -> None:
    shown = list(steps(PAGE.read_text(encoding="utf-8")))
    assert len(shown) >= 15
    assert {step.command.split()[1] for step in shown} >= {"doctor", "preflight", "run", "show", "lineage", "diff", "report", "compare", "trace"}
    assert all(step.said for step in shown), "a command whose output nobody looks at shows nothing"


@pytest.mark.timeout(900)
def test_every_command_does_what_the_page_says(tmp_path: Path) -> None:
    # Mutation: change an option's name, or a word of the page.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "ALMANAC_", "RAY_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = inherited | {"ALMANAC_ROOT": str(tmp_path), "PATH": path, "COLUMNS": "200"}
    for step in steps(PAGE.read_text(encoding="utf-8")):
        done = subprocess.run(
            ["bash", "-c", step.command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400, check=False
        )  # fmt: skip
        printed = done.stdout + done.stderr
        assert done.returncode == step.code, f"$ {step.command}\n{printed}"
        assert missing(step.said, printed) == [], f"$ {step.command}\n{printed}"

"""The names of metrics are frozen: what the source logs stands in docs/tracking.md, and what stands there is logged."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from metric_names import documented, undocumented

ROOT = Path(__file__).parents[3]
GROUPS = {name.partition("/")[0] for name in documented()}
INTERNAL = {
    "response/tokens_total": "divided by the step's seconds, and taken out",
    "sft/tokens": "divided by the step's seconds, and taken out",
    "accuracy/average": "avg@k as a curve, whatever k is",
}
HOLE = "\0"


def written() -> Iterator[str]:
    """Texts of the source that look like names of metrics; `HOLE` stands for what is put in at run time."""
    for path in (*(ROOT / "engine").rglob("*.py"), *(ROOT / "tasks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            group, slash, rest = text.partition("/")
            if slash and group in (*GROUPS, HOLE) and re.fullmatch(rf"[a-z0-9_/{HOLE}]*[a-z0-9{HOLE}]", rest):
                yield text


NAMES = set(written())
SOURCE = "\n".join(path.read_text() for floor in ("engine", "tasks") for path in (ROOT / floor).rglob("*.py"))


def test_there_is_something_to_compare() -> None:
    assert len(NAMES) > 50
    assert len(documented()) > 80


def test_names_in_the_source_are_documented() -> None:
    """Mutation: rename `response/duplicate_share` in engine/algorithms/step.py, or log something new."""
    assert undocumented(name for name in NAMES if HOLE not in name and name not in INTERNAL) == []


@pytest.mark.parametrize("name", sorted(documented()))
def test_a_documented_name_is_in_the_source(name: str) -> None:
    """Mutation: as above; the old name is then found nowhere."""
    made = [text for text in NAMES if re.fullmatch(".+".join(map(re.escape, text.split(HOLE))), name)]
    assert made, "nothing in the source can have this name"
    if all(re.fullmatch(rf"[^/]+/{HOLE}", text) for text in made):
        # Put together from a group and a word, which is then somewhere by itself.
        assert re.search(rf"\b{re.escape(name.partition('/')[2])}\b", SOURCE), "nothing in the source has this name's end"


def test_a_name_of_a_run_is_judged_by_the_whole_of_it() -> None:
    names = ["accuracy/avg_at_16_low", "reward/math_verify_mean", "timing/log_prob_seconds", "accuracy_by_difficulty/greedy/12", "policy/entropy"]
    assert undocumented(names) == []
    # Mutation: `match` instead of `fullmatch`.
    assert undocumented(["policy/entropy_of_mine", "reward/math_verify_means"]) == ["policy/entropy_of_mine", "reward/math_verify_means"]

"""Schemas between tasks: what is wrong is named with row, column, value and reason, all rows at once; further columns do not matter."""

import re
from pathlib import Path
from typing import Any

import pytest

from tasks.config_data import ColumnsConfig
from tasks.data_error import DataError
from tasks.data_files import read_preferences
from tasks.mapping import Wrong
from tasks.schemas import CONVERSATIONS, DIFFICULTY, METRICS, PREFERENCES, PROMPTS, ROLLOUTS, check


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=False)]


GOOD: dict[str, tuple[Any, dict[str, Any]]] = {
    "prompts": (PROMPTS, {"prompt": chat("1 + 1?"), "data_source": "a", "ability": "math", "ground_truth": "2", "difficulty": None}),
    "conversations": (CONVERSATIONS, {"messages": chat("1 + 1?", "2")}),
    "preferences": (PREFERENCES, {"chosen": chat("1 + 1?", "2"), "rejected": chat("1 + 1?", "3")}),
    "rollouts": (
        ROLLOUTS,
        {
            "sample_id": "rl/1/abc/0",
            "difficulty": "all",
            "prompt": "1 + 1?",
            "response": "",
            "ground_truth": "2",
            "reward": 0.0,
            "reward_status": "ok",
            "reward_reason": "",
            "response_tokens": 0,
            "finished": False,
        },
    ),
    "difficulty": (DIFFICULTY, {"prompt": "abc", "data_source": "a", "right": 3, "samples": 8, "rate": 3 / 8}),
    "metrics": (METRICS, {"step": 1, "name": "reward/mean", "value": float("nan")}),
}

BAD: list[tuple[str, str, Any, str]] = [
    ("prompts", "prompt", chat("1", "2"), "must end with a message of the user"),
    ("prompts", "data_source", " ", "must be text"),
    ("prompts", "ability", 1, "must be text"),
    ("prompts", "ground_truth", 2, "must be text without null bytes, or a finite number"),
    ("prompts", "difficulty", Wrong([4], "must be text or a number"), "must be text or a number"),
    ("conversations", "messages", chat("1"), "must end with a message of the assistant"),
    ("preferences", "chosen", chat("1"), "must end with a message of the assistant"),
    ("preferences", "rejected", chat("1"), "must end with a message of the assistant"),
    ("rollouts", "sample_id", "", "must be text"),
    ("rollouts", "difficulty", 3, "must be text"),
    ("rollouts", "prompt", "", "must be text"),
    ("rollouts", "response", None, "is null"),
    ("rollouts", "response", 7, "must be text"),
    ("rollouts", "ground_truth", "", "is empty"),
    ("rollouts", "reward", float("nan"), "must be a finite number"),
    ("rollouts", "reward_status", "fine", "must be ok, timeout or error"),
    ("rollouts", "reward_reason", 0, "must be text"),
    ("rollouts", "response_tokens", -1, "must be a whole number of at least 0"),
    ("rollouts", "response_tokens", 1.0, "must be a whole number of at least 0"),
    ("rollouts", "finished", 1, "must be true or false"),
    ("difficulty", "prompt", 5, "must be text"),
    ("difficulty", "data_source", "", "must be text"),
    ("difficulty", "right", -1, "must be a whole number of at least 0"),
    ("difficulty", "samples", 0, "must be a whole number of at least 1"),
    ("difficulty", "rate", 1.5, "must be a finite number of at least 0 and of at most 1"),
    ("metrics", "step", 0.5, "must be a whole number of at least 0"),
    ("metrics", "name", "loss", "must be a name in a group"),
    ("metrics", "value", "0.5", "must be a number"),
    ("metrics", "value", True, "must be a number"),
]


@pytest.mark.parametrize("name", GOOD)
def test_good_rows_pass_with_further_columns(name: str) -> None:
    schema, row = GOOD[name]
    check(schema, [row, {**row, "note": object()}], "here")


def test_every_column_has_a_bad_cell() -> None:
    # Mutation: a new column that takes anything.
    assert {(name, column) for name, column, _, _ in BAD} == {(name, column) for name, (schema, _) in GOOD.items() for column in schema.columns}


# Mutation: leave the explanation of any column out of its schema.
@pytest.mark.parametrize(("name", "column", "value", "reason"), BAD)
def test_a_bad_cell_is_named(name: str, column: str, value: Any, reason: str) -> None:
    schema, row = GOOD[name]
    with pytest.raises(DataError) as error:
        check(schema, [row, {**row, column: value}, row], "here")
    assert str(error.value).startswith(f"here: row 1 (from 0), column {column}: {reason}")
    assert "; its value is " in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("preferences", {"rejected": chat("2 + 2?", "3")}, "they answer one prompt"),
        ("preferences", {"rejected": chat("1 + 1?", "2")}, "are the same"),
        ("rollouts", {"reward_status": "timeout"}, "reward_reason has to say why"),
        ("rollouts", {"reward_reason": "it hung"}, "reward_reason has to say why"),
        ("difficulty", {"right": 9}, "9 right samples of 8"),
        ("difficulty", {"rate": 0.5}, "rate is 0.5, and 3 of 8 are 0.375"),
    ],
)
def test_columns_that_contradict_each_other_are_named(name: str, changes: dict[str, Any], reason: str) -> None:
    schema, row = GOOD[name]
    with pytest.raises(DataError, match=re.escape(reason)) as error:
        check(schema, [row, {**row, **changes}], "here")
    assert "row 1 (from 0), the row: " in str(error.value)


# Two passes: a row's own rules would fail on cells that are no chats. Mutation: ask them before the columns are right.
def test_rules_of_a_row_wait_until_its_columns_are_right() -> None:
    schema, row = GOOD["preferences"]
    with pytest.raises(DataError) as error:
        check(schema, [{**row, "chosen": None}, {**row, "rejected": row["chosen"]}], "here")
    assert "column chosen: is null" in str(error.value)


@pytest.mark.parametrize("name", GOOD)
def test_missing_columns_are_all_named(name: str) -> None:
    schema, _ = GOOD[name]
    with pytest.raises(DataError) as error:
        check(schema, [{"note": 1}], "here")
    assert [problem.split(";")[0] for problem in error.value.problems] == [f"lacks the column {column}" for column in schema.columns]


def test_preference_pairs_are_read_from_any_columns(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(
        '{"better": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}], '
        '"rejected": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "3"}]}'
    )
    assert read_preferences(tmp_path / "pairs.jsonl", ColumnsConfig(chosen="better")) == [(chat("1?", "2"), chat("1?", "3"))]
    with pytest.raises(DataError, match=r"lacks the column chosen; it has: better, rejected"):
        read_preferences(tmp_path / "pairs.jsonl", ColumnsConfig())

"""What prompts and conversations must look like, as pandera schemas, and the error that says where a file does not."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pandera.pandas as pa

SHOWN = 10
"""Problems that an error spells out; the others are counted."""


class DataError(ValueError):
    """Data that cannot be used. The message names the file and the first rows, columns and values, with the reason."""

    def __init__(self, source: Path | str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = list(problems)
        if len(self.problems) == 1:
            text = f"{source}: {self.problems[0]}"
        else:
            more = f"\n  ... and {len(self.problems) - SHOWN} more" if len(self.problems) > SHOWN else ""
            text = f"{source}: {len(self.problems)} problems\n  " + "\n  ".join(self.problems[:SHOWN]) + more
        super().__init__(text)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) and value[key].strip() for key in ("role", "content"))


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(_is_message(message) for message in value)


def _ends_with(role: str) -> Callable[[Any], bool]:
    # What is no chat at all has its own check, and one reason is enough.
    return lambda value: not _is_chat(value) or value[-1]["role"] == role


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _truth(value: Any) -> Any:
    return value.get("ground_truth") if isinstance(value, Mapping) else "is checked elsewhere"


def _has_truth(value: Any) -> bool:
    truth = _truth(value)
    empty = truth is None or (isinstance(truth, float) and math.isnan(truth)) or (isinstance(truth, str) and not truth.strip(" \t\r\n\0"))
    return not empty


def _truth_is_text(value: Any) -> bool:
    truth = _truth(value)
    return not _has_truth(value) or (isinstance(truth, str) and "\0" not in truth)


def _column(*checks: tuple[Callable[[Any], bool], str], nullable: bool = False) -> pa.Column:
    return pa.Column(object, [pa.Check(test, element_wise=True, error=reason) for test, reason in checks], nullable=nullable)


_CHAT = (_is_chat, "must be a list of messages, each with a role and a content that is not blank")

PROMPTS = pa.DataFrameSchema(
    {
        "prompt": _column(_CHAT, (_ends_with("user"), "must end with a message of the user")),
        "data_source": _column((_is_text, "must be text")),
        "ability": _column((_is_text, "must be text")),
        "reward_model": _column(
            (lambda value: isinstance(value, Mapping), "must be an object with ground_truth, or the JSON text of one"),
            (_has_truth, "ground_truth is empty"),
            (_truth_is_text, "ground_truth must be text without null bytes, or a finite number"),
        ),
        "extra_info": _column((lambda value: isinstance(value, Mapping), "must be an object, or the JSON text of one"), nullable=True),
    },
    name="prompts",
)
"""Rows that reinforcement learning and evaluation take. Further columns are allowed."""

CONVERSATIONS = pa.DataFrameSchema({"messages": _column(_CHAT, (_ends_with("assistant"), "must end with a message of the assistant"))}, name="sft")
"""Rows that supervised fine-tuning takes. Further columns are allowed."""


def check(schema: pa.DataFrameSchema, rows: Sequence[Mapping[str, Any]], source: Path) -> None:
    """Compares every row with the schema, and reports all that is wrong at once.

    Raises:
        DataError: a column is missing, or cells are null or of another shape; rows count from 0.
    """
    there = sorted({column for row in rows for column in row})
    missing = [column for column in schema.columns if column not in there]
    if missing:
        raise DataError(source, [f"lacks the column {column}; it has: {', '.join(there)}" for column in missing])
    table = pd.DataFrame({column: pd.Series([row.get(column) for row in rows], dtype=object) for column in schema.columns})
    try:
        schema.validate(table, lazy=True)
    except pa.errors.SchemaErrors as errors:
        cases = errors.failure_cases.sort_values("index", kind="stable")
        problems = [
            f"row {row} (from 0), column {column}: {'is null' if reason == 'not_nullable' else reason}; its value is {_short(value)}"
            for row, column, reason, value in zip(cases["index"], cases["column"], cases["check"], cases["failure_case"], strict=True)
        ]
        raise DataError(source, problems) from errors


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

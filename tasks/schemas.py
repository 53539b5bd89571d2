"""What goes from task to task, as pandera schemas, and the check that says where it is not so."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pandera.pandas as pa

from tasks.data_error import DataError
from tasks.mapping import Wrong

Explain = Callable[[Any], str | None]
"""What is wrong with a value, or None."""

WHOLE_ROW = "the row"
"""Stands where a column's name does in a problem that no single column has."""


def _column(explain: Explain, *, nullable: bool = False) -> pa.Column:
    def whole(value: Any) -> str | None:
        return (None if nullable else "is null") if value is None else explain(value)

    # pandera takes NaN for null, which it is not everywhere; and it knows one fixed text a check: the reason is asked for again where a value fails.
    check = pa.Check(lambda value: whole(value) is None, element_wise=True, ignore_na=False)
    return pa.Column(object, check, nullable=True, metadata={"explain": whole})


def _schema(name: str, columns: Mapping[str, pa.Column], row: Callable[[Mapping[str, Any]], str | None] | None = None) -> pa.DataFrameSchema:
    return pa.DataFrameSchema(dict(columns), name=name, metadata={"row": row})


def _explained(text: str, holds: Callable[[Any], bool]) -> Explain:
    return lambda value: None if holds(value) else text


def _chat(ends_with: str) -> Explain:
    def explain(value: Any) -> str | None:
        if isinstance(value, Wrong):
            return value.reason
        if not isinstance(value, list) or not value or not all(_is_message(message) for message in value):
            return "must be a list of messages, each with a role and a content that is not blank"
        return None if value[-1]["role"] == ends_with else f"must end with a message of the {ends_with}"

    return explain


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) and value[key].strip() for key in ("role", "content"))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _text(value: Any) -> str | None:
    if isinstance(value, Wrong):
        return value.reason
    return None if _is_text(value) else "must be text"


def _truth(value: Any) -> str | None:
    if isinstance(value, Wrong):
        return value.reason
    if (isinstance(value, float) and math.isnan(value)) or (isinstance(value, str) and not value.strip(" \t\r\n\0")):
        return "is empty"
    return None if isinstance(value, str) and "\0" not in value else "must be text without null bytes, or a finite number"


def _number(*, low: float = -math.inf, high: float = math.inf, whole: bool = False) -> Explain:
    what = f"must be a{' whole' if whole else ' finite'} number"
    bounds = [text for text, bound in ((f"of at least {low:g}", low), (f"of at most {high:g}", high)) if math.isfinite(bound)]
    what = " ".join([what, " and ".join(bounds)]).strip()

    def holds(value: Any) -> bool:
        kinds = int if whole else int | float
        return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high

    return _explained(what, holds)


PROMPTS = _schema(
    "prompts",
    {
        "prompt": _column(_chat("user")),
        "data_source": _column(_text),
        "ability": _column(_text),
        "ground_truth": _column(_truth),
        "difficulty": _column(lambda value: value.reason if isinstance(value, Wrong) else None, nullable=True),
    },
)
"""Rows that reinforcement learning and evaluation take."""

CONVERSATIONS = _schema("sft", {"messages": _column(_chat("assistant"))})
"""Rows that supervised fine-tuning takes."""


def _is_pair(row: Mapping[str, Any]) -> str | None:
    if row["chosen"][:-1] != row["rejected"][:-1]:
        return "chosen and rejected must differ in their last message alone: they answer one prompt"
    return "chosen and rejected are the same" if row["chosen"] == row["rejected"] else None


PREFERENCES = _schema("preferences", {"chosen": _column(_chat("assistant")), "rejected": _column(_chat("assistant"))}, _is_pair)
"""Pairs of answers to one prompt, the better and the worse one."""

_STATUS = _explained("must be ok, timeout or error", lambda value: value in ("ok", "timeout", "error"))
_FLAG = _explained("must be true or false", lambda value: isinstance(value, bool))


def _failure_is_told(row: Mapping[str, Any]) -> str | None:
    return "reward_reason has to say why the reward_status is not ok" if (row["reward_status"] == "ok") != (row["reward_reason"] == "") else None


ROLLOUTS = _schema(
    "rollouts",
    {
        "sample_id": _column(_text),
        "difficulty": _column(_text),
        "prompt": _column(_text),
        # A policy may answer nothing at all.
        "response": _column(_explained("must be text", lambda value: isinstance(value, str))),
        "ground_truth": _column(_truth),
        "reward": _column(_number()),
        "reward_status": _column(_STATUS),
        "reward_reason": _column(_explained("must be text", lambda value: isinstance(value, str))),
        "response_tokens": _column(_number(low=0, whole=True)),
        "finished": _column(_FLAG),
    },
    _failure_is_told,
)
"""Scored samples, as in `SamplesGenerated` and in the tables that MLflow shows. The scores of parts, `reward/NAME`, are further columns."""


def _rate_fits(row: Mapping[str, Any]) -> str | None:
    if row["right"] > row["samples"]:
        return f"{row['right']} right samples of {row['samples']}"
    exact = row["right"] / row["samples"]
    return (
        None if math.isclose(row["rate"], exact, abs_tol=1e-9) else f"rate is {row['rate']:g}, and {row['right']} of {row['samples']} are {exact:g}"
    )


DIFFICULTY = _schema(
    "difficulty",
    {
        "prompt": _column(_text),
        "data_source": _column(_text),
        "right": _column(_number(low=0, whole=True)),
        "samples": _column(_number(low=1, whole=True)),
        "rate": _column(_number(low=0, high=1)),
    },
    _rate_fits,
)
"""How often each prompt was answered right."""


def _metric_name(value: Any) -> str | None:
    grouped = _is_text(value) and "/" in value and value == value.strip()
    return None if grouped else "must be a name in a group, such as reward/mean"


METRICS = _schema(
    "metrics",
    {
        "step": _column(_number(low=0, whole=True)),
        "name": _column(_metric_name),
        # NaN and infinity are measurements too: they are counted, and say that something broke.
        "value": _column(_explained("must be a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))),
    },
)
"""Measured numbers, a row each."""


def check(schema: pa.DataFrameSchema, rows: Sequence[Mapping[str, Any]], source: Path | str, names: Mapping[str, str] | None = None) -> None:
    """Compares every row with the schema, and reports all that is wrong at once. Further columns are allowed.

    Columns are looked at first: where one is missing, no row can be right. Rules between the columns of a row wait until each is right.

    Args:
        schema: one of this module.
        rows: by column.
        source: file, for the error.
        names: what columns are called in the file, where that is something else.

    Raises:
        DataError: a column is missing, or cells are null or of another shape; rows count from 0.
    """
    there = sorted({column for row in rows for column in row})
    if missing := [column for column in schema.columns if column not in there]:
        raise DataError(source, [f"lacks the column {column}; it has: {', '.join(there)}" for column in missing])
    called = names or {}
    table = pd.DataFrame({column: pd.Series([row.get(column) for row in rows], dtype=object) for column in schema.columns})
    try:
        schema.validate(table, lazy=True)
    except pa.errors.SchemaErrors as errors:
        cases = errors.failure_cases.sort_values("index", kind="stable")
        problems = [
            _problem(row, called.get(column, column), schema.columns[column].metadata["explain"], table.at[row, column])
            for row, column in zip(cases["index"], cases["column"], strict=True)
        ]
        raise DataError(source, problems) from errors
    if (explain := schema.metadata["row"]) is not None:
        found = ((number, explain(row)) for number, row in enumerate(rows))
        if problems := [f"row {number} (from 0), {WHOLE_ROW}: {reason}" for number, reason in found if reason is not None]:
            raise DataError(source, problems)


def _problem(row: int, name: str, explain: Explain, value: Any) -> str:
    return f"row {row} (from 0), column {name}: {explain(value)}; its value is {_short(value.value if isinstance(value, Wrong) else value)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

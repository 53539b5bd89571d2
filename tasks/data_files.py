"""Reads prompts and conversations from parquet or JSONL files: checked, and brought to one shape."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from tasks.schemas import CONVERSATIONS, PROMPTS, DataError, check

Row = dict[str, Any]


def read_prompts(path: Path) -> list[Row]:
    """Rows with exactly the columns prompt, data_source, ability, reward_model {style, ground_truth: str} and extra_info {difficulty: str}.

    Raises:
        DataError: the file cannot be read, or a row is not what `schemas.PROMPTS` asks for.
    """
    rows = [_parsed(row) for row in _read(path)]
    check(PROMPTS, rows, path)
    return [
        {
            "prompt": _messages(row["prompt"]),
            "data_source": row["data_source"],
            "ability": row["ability"],
            "reward_model": {"style": str(row["reward_model"].get("style") or "rule"), "ground_truth": row["reward_model"]["ground_truth"]},
            "extra_info": {"difficulty": _difficulty(row.get("extra_info"))},
        }
        for row in rows
    ]


def read_conversations(path: Path) -> list[list[dict[str, str]]]:
    """Conversations, each a list of messages that ends with the assistant's.

    Raises:
        DataError: the file cannot be read, or a row is not what `schemas.CONVERSATIONS` asks for.
    """
    rows = _read(path)
    check(CONVERSATIONS, rows, path)
    return [_messages(row["messages"]) for row in rows]


def _read(path: Path) -> list[Row]:
    readers: dict[str, Callable[[Path], list[Row]]] = {".parquet": _read_parquet, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise DataError(path, [f"has the extension {path.suffix!r}; data files are {' or '.join(readers)}"])
    if not path.is_file():
        raise DataError(path, ["is a directory, not a file" if path.is_dir() else "does not exist"])
    if path.stat().st_size == 0:
        raise DataError(path, ["is empty (0 bytes)"])
    rows = readers[path.suffix](path)
    if not rows:
        raise DataError(path, ["holds no rows"])
    return rows


def _read_parquet(path: Path) -> list[Row]:
    try:
        return list(pa.parquet.read_table(path).to_pylist())
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(path, [f"is not a parquet file that can be read: {error}"]) from error


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    problems: list[str] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:  # Broken JSON, or bytes that are not UTF-8.
            problems.append(f"line {number} is not JSON: {error}")
            continue
        if isinstance(row, dict):
            rows.append(row)
        else:
            problems.append(f"line {number} is not a JSON object")
    if problems:
        raise DataError(path, problems)
    return rows


def _parsed(row: Row) -> Row:
    """The row with JSON texts as objects, and a ground truth that is a number as text. What is wrong stays, for the schema to find."""
    row = dict(row)
    for column in ("reward_model", "extra_info"):
        if isinstance(row.get(column), str):
            row[column] = _json_object(row[column])
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping):
        row["reward_model"] = {**reward_model, "ground_truth": _number_as_text(reward_model.get("ground_truth"))}
    return row


def _json_object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _number_as_text(value: Any) -> Any:
    """5 and 5.0 as "5", 0.5 as "0.5". NaN and infinity stay numbers: "nan" would be an answer that nobody meant."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return value
    return str(int(value)) if float(value).is_integer() else repr(value)


def _difficulty(extra_info: Mapping[str, Any] | None) -> str:
    value = _number_as_text((extra_info or {}).get("difficulty"))
    return value if isinstance(value, str) and value else "all"


def _messages(chat: list[Mapping[str, Any]]) -> list[dict[str, str]]:
    return [{"role": message["role"], "content": message["content"]} for message in chat]

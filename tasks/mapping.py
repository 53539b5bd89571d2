"""From the rows of any file to prompts: columns by name or path, the answer within a text, templates."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.rewards.answers import last_boxed
from tasks.config_data import PLACE, RowsConfig

Row = dict[str, Any]
Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Wrong:
    """A value that could not be found where the configuration says, or not be used: it takes the value's place, for the schema to report."""

    value: Any
    """What is there."""
    reason: str


def holder(path: str, names: Sequence[str]) -> str | None:
    """The column of `names` that `path` begins at: itself, or an object that has the rest; None if there is none."""
    parts = path.split(".")
    beginnings = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((name for name in beginnings if name in names), None)


def lacking(needed: Mapping[str, str], there: Sequence[str]) -> list[str]:
    """What is to be said of the columns in `needed` (what it is: its name or path) that a file with the columns `there` has not."""
    missing = {name: what for what, name in needed.items() if holder(name, there) is None}
    return [
        f"lacks the column {name}; it has: {', '.join(there)}" + ("" if name.split(".")[-1] == what else f" (data.columns.{what} names another)")
        for name, what in missing.items()
    ]


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """What stands at `path`, or None. Names that have dots of their own are found; JSON text stands for the object."""
    name = holder(path, list(row))
    if name is None:
        return None
    value, rest = row[name], path[len(name) + 1 :]
    if not rest or value is None:
        return value
    opened = _json_object(value)
    return value_at(opened, rest) if isinstance(opened, Mapping) else Wrong(value, "must be an object, or the JSON text of one")


def prompt_row(row: Mapping[str, Any], rows: RowsConfig) -> Row:
    """Our columns of a row: prompt, data_source, ability, ground_truth, difficulty."""
    columns = rows.columns
    return {
        "prompt": as_chat(value_at(row, columns.prompt)),
        "data_source": value_at(row, columns.data_source) if rows.data_source is None else rows.data_source,
        "ability": value_at(row, columns.ability) if rows.ability is None else rows.ability,
        "ground_truth": _answer(value_at(row, columns.ground_truth), rows.answer),
        "difficulty": number_as_text(value_at(row, columns.difficulty)),
    }


def as_chat(value: Any) -> Any:
    """Text as a message of the user, JSON text as the list that it is; anything else as it is."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        opened = _loaded(value)
        if isinstance(opened, list) and all(isinstance(message, Mapping) for message in opened):
            return opened
    return [{"role": "user", "content": value}]


def templated(messages: Messages, rows: RowsConfig) -> list[dict[str, str]]:
    """The chat with the template around its last user message, and the system prompt before it."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    chat = [
        {**message, "content": rows.prompt_template.replace(PLACE, message["content"])} if i == last else dict(message)
        for i, message in enumerate(messages)
    ]
    if rows.system_prompt is None:
        return chat
    return [{"role": "system", "content": rows.system_prompt}, *(message for message in chat if message["role"] != "system")]


def bare(messages: Messages, rows: RowsConfig) -> list[dict[str, str]]:
    """The chat without template and system prompt, where it has them: `templated` undone."""
    before, after = rows.prompt_template.split(PLACE)
    chat = []
    for message in messages:
        content = message["content"]
        if message["role"] == "system" and content == rows.system_prompt:
            continue
        if content.startswith(before) and content.endswith(after) and len(content) >= len(before) + len(after):
            content = content[len(before) : len(content) - len(after)]
        chat.append({**message, "content": content})
    return chat


def number_as_text(value: Any) -> Any:
    """5 and 5.0 as "5", 0.5 as "0.5". NaN and infinity stay numbers: "nan" would be an answer that nobody meant."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return value
    return str(int(value)) if float(value).is_integer() else repr(value)


def _answer(value: Any, kind: str) -> Any:
    value = _ANSWERS[kind](value)
    return number_as_text(value)


def _after_hashes(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    _, found, answer = value.rpartition("####")
    return answer.strip().replace(",", "") if found else Wrong(value, "has no #### before an answer")


def _boxed(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    answer = last_boxed(value)
    return Wrong(value, r"has no \boxed{} with an answer") if answer is None else answer.strip()


def _first_of_list(value: Any) -> Any:
    opened = _loaded(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    if opened is None or isinstance(opened, Wrong):
        return opened
    return opened[0] if isinstance(opened, list) and opened else Wrong(value, "must be a list with an answer, or the JSON text of one")


_ANSWERS: Mapping[str, Callable[[Any], Any]] = {
    "whole": lambda value: value,
    "after_hashes": _after_hashes,
    "boxed": _boxed,
    "first_of_list": _first_of_list,
}


def _json_object(value: Any) -> Any:
    return _loaded(value) if isinstance(value, str) else value


def _loaded(text: str) -> Any:
    """What the JSON text means; the text itself where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text

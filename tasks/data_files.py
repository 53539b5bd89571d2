"""Reads prompts, conversations and preference pairs from files of any known format: checked, and brought to one shape."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks import readers
from tasks.config_data import ColumnsConfig, RowsConfig
from tasks.data_error import DataError
from tasks.mapping import as_chat, lacking, prompt_row, value_at
from tasks.schemas import CONVERSATIONS, PREFERENCES, PROMPTS, check

Row = dict[str, Any]
Chat = list[dict[str, str]]


def read_prompts(path: Path, rows: RowsConfig) -> list[Row]:
    """Rows with exactly the columns prompt, data_source, ability, reward_model {style, ground_truth: str} and extra_info {difficulty: str}.

    Templates are not applied yet: whether a prompt stands in two files is asked of the prompts without them.

    Raises:
        DataError: the file cannot be read, or a row is not what `schemas.PROMPTS` asks for; columns are called as in the file.
    """
    found = readers.read(path)
    _have_columns(path, found, rows.needed())
    ours = [prompt_row(row, rows) for row in found]
    check(PROMPTS, ours, path, rows.columns.model_dump())
    return [
        {
            "prompt": _messages(row["prompt"]),
            "data_source": row["data_source"],
            "ability": row["ability"],
            "reward_model": {"style": "rule", "ground_truth": row["ground_truth"]},
            "extra_info": {"difficulty": row["difficulty"] if isinstance(row["difficulty"], str) and row["difficulty"] else "all"},
        }
        for row in ours
    ]


def read_conversations(path: Path, columns: ColumnsConfig) -> list[Chat]:
    """Conversations, each a list of messages that ends with the assistant's.

    Raises:
        DataError: the file cannot be read, or a row is not what `schemas.CONVERSATIONS` asks for.
    """
    found = readers.read(path)
    _have_columns(path, found, {"messages": columns.messages})
    ours = [{"messages": as_chat(value_at(row, columns.messages))} for row in found]
    check(CONVERSATIONS, ours, path, columns.model_dump())
    return [_messages(row["messages"]) for row in ours]


def read_preferences(path: Path, columns: ColumnsConfig) -> list[tuple[Chat, Chat]]:
    """Pairs of conversations from one prompt, the better one first.

    Raises:
        DataError: the file cannot be read, or a row is not what `schemas.PREFERENCES` asks for.
    """
    found = readers.read(path)
    _have_columns(path, found, {"chosen": columns.chosen, "rejected": columns.rejected})
    ours = [{name: as_chat(value_at(row, getattr(columns, name))) for name in ("chosen", "rejected")} for row in found]
    check(PREFERENCES, ours, path, columns.model_dump())
    return [(_messages(row["chosen"]), _messages(row["rejected"])) for row in ours]


def _have_columns(path: Path, rows: list[Row], needed: Mapping[str, str]) -> None:
    there = sorted({name for row in rows for name in row})
    if problems := lacking(needed, there):
        raise DataError(path, problems)


def _messages(chat: list[Mapping[str, Any]]) -> Chat:
    return [{"role": message["role"], "content": message["content"]} for message in chat]

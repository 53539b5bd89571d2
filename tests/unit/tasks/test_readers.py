"""One reader a format: every format gives the same rows, and what cannot be read is named with its line."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.data_error import DataError
from tasks.readers import digest, read, reader_of

ROWS = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(5)]


def save_to_disk(directory: Path, shards: list[list[dict[str, Any]]], **state: Any) -> Path:
    """The files that `datasets.save_to_disk` writes: a stream of Arrow batches for each shard, and who they are."""
    directory.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(directory / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    plain = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0123456789abcdef", "_format_columns": None, "_split": "train"}
    (directory / "state.json").write_text(json.dumps(plain | state))
    (directory / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return directory


def save_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def as_json(value: Any) -> str:
    """Letters as they are, as other programs write them: a line separator within a text ends no line."""
    return json.dumps(value, ensure_ascii=False)


def written(path: Path, save: Callable[[Path], Any]) -> Path:
    save(path)
    return path


FORMATS: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {
    "parquet": lambda folder, rows: written(folder / "a.parquet", lambda path: pq.write_table(pa.Table.from_pylist(rows), path)),
    "jsonl": lambda folder, rows: written(folder / "a.jsonl", lambda path: path.write_text("\n\n".join(map(as_json, rows)), encoding="utf-8")),
    "list": lambda folder, rows: written(folder / "a.json", lambda path: path.write_text(json.dumps(rows, indent=1), encoding="utf-8")),
    "lines": lambda folder, rows: written(folder / "b.json", lambda path: path.write_text("\n".join(map(as_json, rows)), encoding="utf-8")),
    "csv": lambda folder, rows: save_csv(folder / "a.csv", rows),
    "dataset": lambda folder, rows: save_to_disk(folder / "a", [rows[:3], rows[3:]]),
}


# Mutation: read one shard, or the shards in the order of a directory listing; take the header for a row.
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows_and_columns(tmp_path: Path, name: str) -> None:
    path = FORMATS[name](tmp_path, ROWS)
    assert read(path) == ROWS
    assert reader_of(path).columns(path) in (["question", "answer"], None)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


# Mutation: split CSV into lines before reading it, or read it as text, whose line ends Python changes; split JSON lines where text has line ends.
@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.fixed_dictionaries({"a": texts, "b": texts}), min_size=4, max_size=6))
def test_text_comes_through_every_format(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]]) -> None:
    folder = tmp_path_factory.mktemp("files")
    assert {name: read(write(folder, rows)) for name, write in FORMATS.items()} == dict.fromkeys(FORMATS, rows)


def problems(path: Path) -> str:
    with pytest.raises(DataError) as error:
        read(path)
    assert str(path) in str(error.value)
    return "\n".join(error.value.problems)


def test_csv_lines_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    # The second record spans two lines. Mutation: count records for lines.
    path.write_text('question,answer\n"1 +\n1?",2\n\n3,4,5\n6\n')
    assert problems(path) == "line 5 has 3 cells, the header 2\nline 6 has 1 cells, the header 2"
    path.write_text("question,answer,question\n1,2,3\n")
    assert "several columns called question" in problems(path)
    path.write_text('question,answer\n"1,2\n')
    assert "is not CSV" in problems(path)
    path.write_bytes("a,b\n1,\xe9\n".encode("latin-1"))
    assert "is not UTF-8" in problems(path)
    path.write_text("question,answer\n")
    assert problems(path) == "holds no rows"
    assert reader_of(path).columns(path) == []


def test_an_empty_cell_of_csv_is_null_and_a_byte_order_mark_no_letter(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\ufeffquestion,answer\n1,\n", encoding="utf-8")
    assert read(tmp_path / "a.csv") == [{"question": "1", "answer": None}]


def test_json_that_holds_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"a": 1}, 2, "three"]')
    assert problems(tmp_path / "a.json") == "row 1 (from 0) is not a JSON object\nrow 2 (from 0) is not a JSON object"
    (tmp_path / "a.json").write_text('[{"a": 1}')
    assert "is not JSON" in problems(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"a": 1}\n{')
    assert "line 2 is not JSON" in problems(tmp_path / "a.json")


def test_what_is_no_saved_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "is a directory without state.json" in problems(tmp_path / "folder")
    save_to_disk(tmp_path / "all" / "train", [ROWS])
    save_to_disk(tmp_path / "all" / "test", [ROWS])
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert problems(tmp_path / "all") == "holds several splits; name the directory of one: test, train"
    assert "flatten_indices" in problems(save_to_disk(tmp_path / "chosen", [ROWS], _indices_data_files=[{"filename": "indices.arrow"}]))
    # Mutation: join the name to the directory without looking: a dataset from elsewhere reads any file of the machine.
    there = "../all/train/data-00000-of-00001.arrow"
    assert f"{there}, which is not there" in problems(save_to_disk(tmp_path / "up", [ROWS], _data_files=[{"filename": there}]))
    assert "x.arrow, which is not there" in problems(save_to_disk(tmp_path / "gone", [ROWS], _data_files=[{"filename": "x.arrow"}]))
    assert "does not name its files" in problems(save_to_disk(tmp_path / "odd", [ROWS], _data_files=None))
    broken = save_to_disk(tmp_path / "broken", [ROWS])
    (broken / "data-00000-of-00001.arrow").write_bytes(b"garbage" * 100)
    assert "data-00000-of-00001.arrow is not an Arrow file" in problems(broken)


def test_a_hub_name_is_not_loaded(tmp_path: Path) -> None:
    assert "a name of the Hugging Face hub is not loaded" in problems(tmp_path / "openai" / "gsm8k")


# Mutation: digest the names alone, or the first file.
def test_the_digest_of_a_directory_sees_every_file(tmp_path: Path) -> None:
    first = save_to_disk(tmp_path / "a", [ROWS[:2], ROWS[2:]])
    assert digest(first) == digest(save_to_disk(tmp_path / "b", [ROWS[:2], ROWS[2:]]))
    assert digest(first) != digest(save_to_disk(tmp_path / "c", [ROWS[:2], ROWS[1:]]))

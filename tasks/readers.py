"""Readers of data files, one a format: the rows as they stand there, or just the names of the columns, which takes no time.

Nothing is loaded from anywhere else. Heavy imports happen inside, so that a preflight stays quick.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.digest import directory_digest, file_digest
from tasks.data_error import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
STATE, SPLITS = "state.json", "dataset_dict.json"


@dataclass(frozen=True, slots=True)
class Reader:
    """One format."""

    name: str
    read: Callable[[Path], list[Row]]
    """All rows, in their order. Raises `DataError` with every line that cannot be read."""
    columns: Callable[[Path], list[str] | None]
    """Names of the columns; None where only all rows could tell; empty where there is no row. Raises `DataError`, `OSError` or `ValueError`."""


def reader_of(path: Path) -> Reader:
    """The reader of a file, by its extension, or of a directory.

    Raises:
        DataError: there is nothing, or nothing in it, or the format is unknown.
    """
    if not path.exists():
        hub = "" if path.suffix in READERS else "; a name of the Hugging Face hub is not loaded: save that dataset with save_to_disk first"
        raise DataError(path, [f"does not exist{hub}"])
    if path.is_dir():
        return DATASET
    if path.suffix not in READERS:
        raise DataError(path, [f"has the extension {path.suffix!r}; data are {_known()}, or a directory that datasets.save_to_disk wrote"])
    if path.stat().st_size == 0:
        raise DataError(path, ["is empty (0 bytes)"])
    return READERS[path.suffix]


def read(path: Path) -> list[Row]:
    """All rows of a file, at least one.

    Raises:
        DataError: it cannot be read, or holds no rows.
    """
    rows = reader_of(path).read(path)
    if not rows:
        raise DataError(path, ["holds no rows"])
    return rows


def digest(path: Path) -> str:
    """SHA-256 of a file; of a directory, of its files' names and contents."""
    return file_digest(path) if path.is_file() else directory_digest(path)


def _known() -> str:
    return ", ".join(READERS)


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return list(parquet.read_table(path).to_pylist())
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(path, [f"is not a parquet file that can be read: {error}"]) from error


def _parquet_columns(path: Path) -> list[str]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:  # Its ArrowInvalid is a ValueError.
        return list(file.schema_arrow.names) if file.metadata.num_rows else []


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


def _jsonl_columns(path: Path) -> list[str] | None:
    """A column of nulls may be left out of some rows, so one row tells nothing of the columns."""
    with path.open(encoding="utf-8") as lines:
        first = next((line for line in lines if line.strip()), None)
    if first is None:
        return []
    if not isinstance(json.loads(first), dict):
        raise ValueError("its first line is not a JSON object")
    return None


def _read_json(path: Path) -> list[Row]:
    """A list of objects; many a file of this name holds an object a line instead."""
    if not _is_list(path):
        return _read_jsonl(path)
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(path, [f"is not JSON: {error}"]) from error
    if problems := [f"row {number} (from 0) is not a JSON object" for number, row in enumerate(found) if not isinstance(row, dict)]:
        raise DataError(path, problems)
    return list(found)


def _json_columns(path: Path) -> list[str] | None:
    return None if _is_list(path) else _jsonl_columns(path)


def _is_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).lstrip()[:1] == b"["


def _read_csv(path: Path) -> list[Row]:
    """Every cell is text, and an empty one is null."""
    records = _csv_records(path)
    _, names = next(records, (0, []))
    problems = [f"line {number} has {len(cells)} cells, the header {len(names)}" for number, cells in _csv_records(path) if len(cells) != len(names)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problems.insert(0, f"its header has several columns called {', '.join(twice)}")
    if problems:
        raise DataError(path, problems)
    return [{name: cell or None for name, cell in zip(names, cells, strict=True)} for _, cells in records]


def _csv_columns(path: Path) -> list[str]:
    records = _csv_records(path)
    header, first = next(records, None), next(records, None)
    return header[1] if header is not None and first is not None else []


def _csv_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The line that a record begins in, and its cells; blank lines are none."""
    try:
        text = path.read_bytes().decode("utf-8-sig")  # Read as text, line ends within a cell would change.
    except UnicodeDecodeError as error:
        raise DataError(path, [f"is not UTF-8: {error}"]) from error
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    records = csv.reader(io.StringIO(text, newline=""), strict=True)
    begins = 1
    while True:
        try:
            cells = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(path, [f"line {records.line_num} is not CSV: {error}"]) from error
        if cells:
            yield begins, cells
        begins = records.line_num + 1


def _read_dataset(path: Path) -> list[Row]:
    import pyarrow as pa

    rows: list[Row] = []
    for file in _shards(path):
        try:
            with pa.memory_map(str(file)) as source, _arrow(source) as batches:
                rows += batches.read_all().to_pylist()
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(path, [f"{file.name} is not an Arrow file that can be read: {error}"]) from error
    return rows


def _dataset_columns(path: Path) -> list[str]:
    import pyarrow as pa

    names: list[str] = []
    for file in _shards(path):
        with pa.memory_map(str(file)) as source, _arrow(source) as batches:
            names = list(batches.schema.names)
    return names


def _arrow(source: "pa.MemoryMappedFile") -> Any:
    """`datasets` writes streams; older versions and other programs write files with a footer."""
    from pyarrow import ipc

    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return ipc.open_file(source) if is_file else ipc.open_stream(source)


def _shards(path: Path) -> list[Path]:
    """The Arrow files of a saved dataset, in the order of its rows."""
    if (path / SPLITS).is_file():
        there = ", ".join(sorted(folder.name for folder in path.iterdir() if (folder / STATE).is_file()))
        raise DataError(path, [f"holds several splits; name the directory of one: {there}"])
    if not (path / STATE).is_file():
        raise DataError(path, [f"is a directory without {STATE}, so datasets.save_to_disk did not write it; name a file ({_known()})"])
    try:
        state = json.loads((path / STATE).read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(path, [f"its {STATE} does not name its files as datasets.save_to_disk does: {error!r}"]) from error
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(path, ["its rows are chosen by a file of indices; write it anew after flatten_indices()"])
    problems = [f"{STATE} names {name}, which is not there" for name in names if Path(name).name != name or not (path / name).is_file()]
    if problems:
        raise DataError(path, problems)
    return [path / name for name in names]


READERS: Mapping[str, Reader] = {
    ".parquet": Reader("parquet", _read_parquet, _parquet_columns),
    ".jsonl": Reader("jsonl", _read_jsonl, _jsonl_columns),
    ".json": Reader("json", _read_json, _json_columns),
    ".csv": Reader("csv", _read_csv, _csv_columns),
}
"""By extension."""
DATASET = Reader("saved dataset", _read_dataset, _dataset_columns)
"""Of a directory that `datasets.save_to_disk` wrote. The library itself is not needed."""

"""Makes a data set's splits as parquet with a manifest, and loads them: the only way by which data reaches training and evaluation."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from engine.atomic import atomic_directory
from engine.prompts import Prompt, content_hash
from tasks import fingerprint, readers, workspace
from tasks.config_data import ColumnsConfig, DataConfig, RowsConfig
from tasks.data_error import DataError
from tasks.data_files import read_conversations, read_prompts
from tasks.lineage import hold_file
from tasks.mapping import bare, prompt_row, templated
from tasks.schemas import PROMPTS, check

Row = dict[str, Any]
Messages = Sequence[dict[str, str]]
PROMPT_SPLITS = ("train", "validation", "test")
MANIFEST = "manifest.json"
CODE = ("tasks/chain_sums.py", "tasks/data.py", "tasks/data_files.py", "tasks/mapping.py", "tasks/readers.py", "tasks/schemas.py")
"""Whose source the rows depend on."""

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_COLUMNS = {
    "prompts": pa.schema(
        [
            ("prompt", _MESSAGES),
            ("data_source", pa.string()),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64()), ("difficulty", pa.string()), ("prompt_tokens", pa.int64())])),
        ]
    ),
    "sft": pa.schema([("messages", _MESSAGES)]),
}


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A data set that lies ready."""

    directory: Path
    digests: dict[str, str]
    """SHA-256 of each split's file."""
    rows: dict[str, int]
    inputs: dict[str, str]
    """SHA-256 of each file that they were made from, by its setting."""
    dropped: dict[str, dict[str, int]]
    """For each split, how many rows were left out as `duplicates`, as `too_long`, or as `held_out` (SFT rows of prompts of test or validation)."""
    reused: bool
    """It was there already, made from the same settings, and its files are as they were written."""

    def path(self, split: str) -> Path:
        """File of a split. Raises `DataError` where the data set has none (`sft`, without `data.sft_file`)."""
        if split not in self.digests:
            raise DataError(self.directory, [f"has no split {split}; set data.{split}_file"])
        return self.directory / f"{split}.parquet"

    def unchanged(self, split: str) -> Path:
        """File of a split that is about to be loaded, hashed. Raises `ChangedInputError` where it is not the one of `digests` any more."""
        path = self.path(split)
        hold_file(f"split {split},", path, self.digests[split])
        return path


def prepare(
    config: DataConfig,
    seed: int,
    directory: Path,
    max_prompt_tokens: int,
    count_tokens: Callable[[Messages], int],
    counted_by: str = "",
) -> PreparedData:
    """Writes `sft`, `train`, `validation` and `test` as parquet into `directory`, with a manifest; all of it or nothing.

    No prompt stands twice in a split, and none of test or validation in any other split. What lies there already is kept when it was
    made from the same settings and input files by the same code and its own files still have their hashes.

    Args:
        config: generated sums, or the user's files.
        seed: chooses the generated sums. Held-out prompts of files are chosen by content hash, whatever the seed.
        directory: of the data set, such as `data/chain_sum`.
        max_prompt_tokens: longer prompts are dropped and counted.
        count_tokens: length of a rendered prompt.
        counted_by: names the tokenizer behind `count_tokens`: another one makes the data anew.

    Raises:
        DataError: an input file cannot be used, no prompt is left, or a held-out prompt stands in another split.
        ValueError: more sums are asked for than there are.
    """
    inputs = {name: workspace.root() / file for name in ("train", "validation", "test", "sft") if (file := getattr(config, f"{name}_file"))}
    made_from = {
        "configuration": config.content().digest(),
        "code": fingerprint.code(CODE),
        "seed": seed,
        "max_prompt_tokens": max_prompt_tokens,
        "counted_by": counted_by,
        "inputs": {name: readers.digest(path) for name, path in inputs.items() if path.exists()},
    }
    existing = _existing(directory, inputs)
    if existing is not None and existing["made_from"] == made_from and _intact(directory, existing):
        return _prepared(directory, existing, reused=True)

    splits, dropped = _from_files(config, inputs) if inputs else _generated(config, seed)
    for name in PROMPT_SPLITS:
        splits[name] = [{**row, "prompt": templated(row["prompt"], config.rows_of(name))} for row in splits[name]]
        kept = _short_enough(splits[name], max_prompt_tokens, count_tokens, inputs.get(name, directory / f"{name}.parquet"))
        dropped[name]["too_long"] = len(splits[name]) - len(kept)
        splits[name] = [
            {**row, "extra_info": {**row["extra_info"], "split": name, "index": i, "prompt_tokens": tokens}} for i, (row, tokens) in enumerate(kept)
        ]

    with atomic_directory(directory) as fresh:
        manifest = {"made_from": made_from, "files": {}}
        for name, rows in splits.items():
            file = fresh / f"{name}.parquet"
            pa.parquet.write_table(pa.Table.from_pylist(rows, schema=_COLUMNS["sft" if name == "sft" else "prompts"]), file)
            manifest["files"][file.name] = {"sha256": readers.digest(file), "rows": len(rows), "dropped": dropped[name]}
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return _prepared(directory, manifest, reused=False)


def load_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file, in its order. Raises `DataError` where a row is not what `schemas.PROMPTS` asks for."""
    return [
        Prompt(
            id=content_hash(row["prompt"]),
            index=index,
            messages=tuple(row["prompt"]),
            data_source=row["data_source"],
            ground_truth=row["reward_model"]["ground_truth"],
            difficulty=row["extra_info"]["difficulty"],
        )
        for index, row in enumerate(read_prompts(path, RowsConfig()))
    ]


def load_conversations(path: Path) -> list[list[dict[str, str]]]:
    """Conversations of a file, in its order. Raises `DataError` where a row is not what `schemas.CONVERSATIONS` asks for."""
    return read_conversations(path, ColumnsConfig())


def _generated(config: DataConfig, seed: int) -> tuple[dict[str, list[Row]], dict[str, dict[str, int]]]:
    from tasks.chain_sums import chain_sums

    assert config.chain_sum is not None, "DataConfig allows no other source without files"
    splits = chain_sums(config.chain_sum, seed)
    for name in PROMPT_SPLITS:
        check(PROMPTS, [prompt_row(row, RowsConfig()) for row in splits[name]], f"chain_sum ({name})")
    # What it is taught on must look like what it is asked.
    splits["sft"] = [{"messages": templated(row["messages"], config)} for row in splits["sft"]]
    return splits, {name: {"duplicates": 0} for name in splits}


def _from_files(config: DataConfig, inputs: dict[str, Path]) -> tuple[dict[str, list[Row]], dict[str, dict[str, int]]]:
    splits: dict[str, list[Row]] = {}
    dropped: dict[str, dict[str, int]] = {}
    prompts: dict[str, dict[str, int]] = {}  # split -> content hash -> row of its file
    for name in PROMPT_SPLITS:
        if name in inputs:
            rows = read_prompts(inputs[name], config.rows_of(name))
            prompts[name] = _first_rows([content_hash(row["prompt"]) for row in rows])
            splits[name] = [rows[i] for i in prompts[name].values()]
            dropped[name] = {"duplicates": len(rows) - len(splits[name])}
    for held_out, other in (("test", "train"), ("validation", "train"), ("test", "validation")):
        if held_out in prompts and other in prompts:
            _refuse_overlap(held_out, prompts[held_out], other, prompts[other], inputs)
    taken = [name for name in ("test", "validation") if name not in inputs]
    _take_held_out(splits, dropped, taken, config.held_out_fraction, inputs["train"])
    if "sft" in inputs:
        splits["sft"], dropped["sft"] = _sft_from_file(splits, prompts, taken, config, inputs)
    return splits, dropped


def _take_held_out(splits: dict[str, list[Row]], dropped: dict[str, dict[str, int]], taken: Sequence[str], fraction: float, train_file: Path) -> None:
    """Moves the prompts with the lowest content hashes from train to the splits in `taken`: a choice that the order of rows does not change."""
    by_hash = sorted(splits["train"], key=lambda row: content_hash(row["prompt"]))
    size = max(1, round(fraction * len(by_hash)))
    if taken and len(by_hash) <= size * len(taken):
        raise DataError(train_file, [f"its {len(by_hash)} different prompts are too few to take {' and '.join(taken)} out of; add rows or files"])
    for i, name in enumerate(taken):
        splits[name] = by_hash[i * size : (i + 1) * size]
        dropped[name] = {"duplicates": 0}
    held_out = {id(row) for row in by_hash[: size * len(taken)]}
    splits["train"] = [row for row in splits["train"] if id(row) not in held_out]


def _sft_from_file(
    splits: dict[str, list[Row]], prompts: dict[str, dict[str, int]], taken: Sequence[str], config: DataConfig, inputs: dict[str, Path]
) -> tuple[list[Row], dict[str, int]]:
    conversations = read_conversations(inputs["sft"], config.columns)
    first = _first_rows([content_hash(chat) for chat in conversations])
    questions: dict[str, int] = {}
    for row in first.values():
        questions.setdefault(_question_hash(conversations[row], config), row)
    for held_out in ("test", "validation"):
        if held_out in prompts:
            _refuse_overlap(held_out, prompts[held_out], "sft", questions, inputs)
    # The user could not know which prompts we would take: their conversations go out with them.
    hidden = {content_hash(row["prompt"]) for name in taken for row in splits[name]}
    kept = [conversations[row] for row in first.values() if _question_hash(conversations[row], config) not in hidden]
    if not kept:
        raise DataError(inputs["sft"], ["no conversation is left: all of them answer prompts of test or validation"])
    return [{"messages": chat} for chat in kept], {"duplicates": len(conversations) - len(first), "held_out": len(first) - len(kept)}


def _question_hash(conversation: Messages, rows: RowsConfig) -> str:
    """Hash of the turns before the first answer, as a prompt's is taken: without the template, which conversations may have or not."""
    answer = next(i for i, message in enumerate(conversation) if message["role"] == "assistant")
    return content_hash(bare(conversation[:answer], rows))


def _first_rows(hashes: Sequence[str]) -> dict[str, int]:
    first: dict[str, int] = {}
    for row, digest in enumerate(hashes):
        first.setdefault(digest, row)
    return first


def _refuse_overlap(held_out: str, here: dict[str, int], other: str, there: dict[str, int], inputs: dict[str, Path]) -> None:
    shared = [(row, there[digest]) for digest, row in here.items() if digest in there]
    if shared:
        problems = [f"row {row} (from 0) also stands in {other}: row {other_row} of {inputs[other]}" for row, other_row in shared]
        problems[0] = f"{len(shared)} of its {len(here)} {held_out} prompts also stand in {other}, so they would not be held out: {problems[0]}"
        raise DataError(inputs[held_out], problems)


def _short_enough(rows: list[Row], limit: int, count_tokens: Callable[[Messages], int], source: Path) -> list[tuple[Row, int]]:
    lengths = [count_tokens(row["prompt"]) for row in rows]
    kept = [(row, length) for row, length in zip(rows, lengths, strict=True) if length <= limit]
    if not kept:
        raise DataError(
            source, [f"no prompt is left: all {len(rows)} have more than max_prompt_tokens ({limit}) tokens; the shortest has {min(lengths)}"]
        )
    return kept


def _existing(directory: Path, inputs: dict[str, Path]) -> dict[str, Any] | None:
    """Manifest of what `prepare` wrote there before. Refuses a directory that is not ours to replace."""
    inside = [path for path in inputs.values() if directory.resolve() in path.resolve().parents]
    if inside:
        raise DataError(inside[0], [f"lies in {directory}, which is made anew; put it elsewhere, or give the data another name"])
    if not directory.exists():
        return None
    if not (directory / MANIFEST).is_file():
        if any(directory.iterdir()):
            raise DataError(directory, [f"is not empty and has no {MANIFEST}, so it was not made here; move it away, or give the data another name"])
        return None
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except ValueError:
        return None  # Damaged, and ours: it is written again.
    return manifest if isinstance(manifest, dict) and {"made_from", "files"} <= manifest.keys() else None


def _intact(directory: Path, manifest: dict[str, Any]) -> bool:
    return all((directory / name).is_file() and readers.digest(directory / name) == file["sha256"] for name, file in manifest["files"].items())


def _prepared(directory: Path, manifest: dict[str, Any], *, reused: bool) -> PreparedData:
    files = {Path(name).stem: file for name, file in manifest["files"].items()}
    return PreparedData(
        directory=directory,
        digests={split: file["sha256"] for split, file in files.items()},
        rows={split: file["rows"] for split, file in files.items()},
        inputs={f"data.{name}_file": digest for name, digest in manifest["made_from"]["inputs"].items()},
        dropped={split: file["dropped"] for split, file in files.items()},
        reused=reused,
    )

"""What stages and evaluations leave, kept by what it was made from: whatever lies ready is not made again.

An output is a directory whose name begins its fingerprint; `output.json` is written into it last, with size and SHA-256 of every other file.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from engine.atomic import atomic_file
from engine.digest import file_digest
from tasks import workspace
from tasks.record import StageRecord
from tasks.run_lock import RunInProgressError

OUTPUT = "output.json"
MODEL = "model"
"""The weights that a stage leaves, in its output: an ordinary Hugging Face directory."""
PREFIX_DIGITS = 16
"""Hex digits of the fingerprint in a directory's name."""


class DamagedOutputError(ValueError):
    """Files of an output are gone, or are not as they were written; names them."""


class Output(BaseModel):
    """`output.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint: str
    """SHA-256 of `made_from`, as canonical JSON."""
    made_from: dict[str, Any]
    """Everything that the output depends on."""
    run: str
    """The run that made it."""
    files: dict[str, dict[str, int | str]]
    """`bytes` and `sha256` of each, by its path inside the directory."""
    record: StageRecord | None = None
    """Of a stage, as it was when it had ended; None for an evaluation."""
    metrics: dict[str, float] = {}
    """Of a stage's last step."""


@dataclass(frozen=True)
class Place:
    """Where the output of one stage, or of one evaluation, lies or will lie."""

    recipe: str
    unit: str
    """Name of the stage, or `evaluation`."""
    made_from: Mapping[str, Any]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what it is made from."""
        return _fingerprint(self.made_from)

    @property
    def directory(self) -> Path:
        """Its directory."""
        return workspace.stages_directory() / self.recipe / self.unit / self.fingerprint[:PREFIX_DIGITS]

    def find(self) -> Output | None:
        """What lies there complete, every file hashed; None where nothing does.

        Raises:
            DamagedOutputError: it is complete and yet not as it was written.
        """
        found = read(self.directory)
        if found is not None and found.fingerprint != self.fingerprint:
            raise DamagedOutputError(f"{self.directory / OUTPUT} is of another output, with fingerprint {found.fingerprint}")
        return found

    @contextmanager
    def making(self, *, keep: bool) -> Iterator[Path]:
        """Gives the directory to write into, while no other process does. What lies there goes first, unless `keep` says that it is gone on from.

        Raises:
            RunInProgressError: another process makes the same output.
        """
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.directory.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise RunInProgressError(f"another process makes {self.directory}; wait until it ends, or stop it") from error
        try:
            (self.directory / OUTPUT).unlink(missing_ok=True)
            if not keep:
                shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(exist_ok=True)
            yield self.directory
        finally:
            lock.release()

    def complete(self, run: str, record: StageRecord | None = None, metrics: Mapping[str, float] | None = None) -> None:
        """Everything has been written: hashes it, and says so in `output.json`."""
        made = Output(
            fingerprint=self.fingerprint,
            made_from=dict(self.made_from),
            run=run,
            files=manifest(self.directory),
            record=record,
            metrics=dict(metrics or {}),
        )
        with atomic_file(self.directory / OUTPUT) as file:
            file.write_text(made.model_dump_json(indent=2) + "\n")


def read(directory: Path) -> Output | None:
    """What lies complete in a directory, every file hashed; None where nothing does.

    Raises:
        DamagedOutputError: it is complete and yet not as it was written.
    """
    path = directory / OUTPUT
    if not path.is_file():
        return None
    try:
        found = Output.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DamagedOutputError(f"{path} cannot be read ({error.errors()[0]['msg']})") from error
    if found.fingerprint != _fingerprint(found.made_from):
        raise DamagedOutputError(f"{path} does not say what the output was made from: that has another fingerprint than {found.fingerprint}")
    for name, written in found.files.items():
        file = directory / name
        if not file.is_file():
            raise DamagedOutputError(f"{file} is gone")
        if file_entry(file) != written:
            raise DamagedOutputError(f"{file} is not as it was written: {written['bytes']} bytes with SHA-256 {written['sha256']}")
    return found


def _fingerprint(made_from: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(made_from, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def manifest(directory: Path) -> dict[str, dict[str, int | str]]:
    """Size in bytes and SHA-256 of every file, by its path inside the directory.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"the directory {directory} is gone")
    return {str(path.relative_to(directory)): file_entry(path) for path in sorted(directory.rglob("*")) if path.is_file()}


def file_entry(path: Path) -> dict[str, int | str]:
    """Size in bytes and SHA-256 of one file."""
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}

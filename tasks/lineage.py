"""From what a run is made: resolved before anything is loaded, kept as `lineage.json`; what is loaded afterwards is held against it."""

import functools
import hashlib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from engine import hardware
from engine.atomic import atomic_file
from engine.digest import file_digest
from tasks import checkout, fingerprint, workspace
from tasks.config import RecipeConfig
from tasks.readers import digest

FILE = "lineage.json"
PATCH = "uncommitted.diff"
"""What the code had beyond its commit, beside the lineage."""


class ChangedInputError(ValueError):
    """Something that a run loads is not what its lineage says; names it."""


class InputFile(BaseModel):
    """A file, or a directory of files, that the data are made from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """As the configuration has it."""
    sha256: str


class Lineage(BaseModel):
    """Everything that a run's numbers depend on; null where it cannot be known."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, use_attribute_docstrings=True)

    commit: str | None = None
    """Git commit of the code."""
    uncommitted: bool | None = None
    """Whether the code differed from that commit, new files included."""
    patch_digest: str | None = None
    """SHA-256 of that difference, `uncommitted.diff`; None where there is none."""
    patch_left_out: list[str] = []
    """Files of the difference that were too large to be kept."""
    configuration: dict[str, Any] = {}
    """Resolved."""
    configuration_digest: str
    inputs: dict[str, InputFile] = {}
    """Files that the data are made from, by the setting that names them."""
    own_modules: dict[str, str] = {}
    """SHA-256 of the source of each module of one's own that the configuration names."""
    dataset_digests: dict[str, str] = {}
    """SHA-256 of each prepared split's file, as soon as it lies there."""
    base_model_digest: str | None = None
    """SHA-256 over the files of the weights that the run starts from, as soon as they lie there."""
    lock_digest: str | None = None
    """SHA-256 of the package lock file."""
    packages: dict[str, str] = {}
    """Version of each that is installed."""
    seed: int
    """Every random number of the run is a function of it and of the position."""
    hardware: dict[str, Any] = {}
    parents: dict[str, str] = {}
    """The run that made what was not made again, by DVC's name for it: the stage's, or `evaluate-LABEL`."""


def resolve(config: RecipeConfig, directory: Path | None = None) -> Lineage:
    """What can be known before a run starts. Data and base model follow when they lie there, before they are loaded.

    Args:
        config: resolved.
        directory: of the run: the uncommitted difference goes there.

    Raises:
        OSError: the directory cannot be written.
    """
    beyond = checkout.patch()
    if beyond is not None and beyond.text and directory is not None:
        with atomic_file(directory / PATCH) as file:
            file.write_bytes(beyond.text)
    configuration = config.model_dump(mode="json")
    return Lineage(
        commit=checkout.commit(),
        uncommitted=checkout.uncommitted(),
        patch_digest=hashlib.sha256(beyond.text).hexdigest() if beyond is not None and beyond.text else None,
        patch_left_out=[] if beyond is None else beyond.left_out,
        configuration=configuration,
        configuration_digest=config.digest(),
        inputs={key: InputFile(path=name, sha256=digest(path)) for key, name in _input_files(config) if (path := workspace.root() / name).exists()},
        own_modules=fingerprint.own_modules(configuration),
        lock_digest=_lock_digest(),
        packages=_packages(),
        seed=config.seed,
        hardware=hardware.describe(),
    )


def hold_file(what: str, path: Path, expected: str) -> None:
    """Hashes a file, or a directory, that is about to be loaded.

    Args:
        what: it is, for the error.
        path: of it.
        expected: its digest in the lineage.

    Raises:
        ChangedInputError: it is another one now.
    """
    hold(f"{what} {path}", digest(path) if path.exists() else "nothing", expected)


def hold(what: str, found: str, expected: str | None) -> None:
    """Raises ChangedInputError where the digest of what is loaded is not the lineage's; None: the lineage does not have it."""
    if found != expected:
        raise ChangedInputError(
            f"{what} is not what the run's lineage says: its SHA-256 is {found[:16]}, not {(expected or 'unknown')[:16]}; "
            "it was changed while the run went on: put it back, or start the run anew"
        )


def hold_inputs(lineage: Lineage, found: Mapping[str, str]) -> None:
    """Compares the files that data were made from, digests by setting, with the lineage's. Raises ChangedInputError."""
    for key, sha256 in found.items():
        known = lineage.inputs.get(key)
        hold(f"{key}={known.path if known else ''}", sha256, known.sha256 if known else None)


def hold_modules(lineage: Lineage, found: Mapping[str, str]) -> None:
    """Compares modules of one's own, digests by name, with the lineage's. Raises ChangedInputError."""
    for module, sha256 in found.items():
        hold(f"module {module}", sha256, lineage.own_modules.get(module))


def _input_files(config: RecipeConfig) -> Iterator[tuple[str, str]]:
    for name in ("train_file", "validation_file", "test_file", "sft_file"):
        if (file := getattr(config.data, name)) is not None:
            yield f"data.{name}", file
    for number, file in enumerate(config.data.checks.evaluation_files):
        yield f"data.checks.evaluation_files.{number}", file


@functools.cache
def _packages() -> dict[str, str]:
    return {found.metadata["Name"]: found.version for found in metadata.distributions()}


def _lock_digest() -> str | None:
    """SHA-256 of the lock file that the installed torch belongs to; None where there is no lock file beside the code."""
    try:
        kind = "cpu" if metadata.version("torch").endswith("+cpu") else "gpu"
    except metadata.PackageNotFoundError:
        return None
    path = workspace.checkout() / "requirements" / f"{kind}.lock"
    return file_digest(path) if path.is_file() else None

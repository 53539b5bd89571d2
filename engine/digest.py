"""SHA-256 of files, in hex: what says that bytes are the same."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path


def file_digest(path: Path) -> str:
    """Of one file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_digest(files: Iterable[Path], root: Path) -> str:
    """Of the names below `root` and the contents of these files, in their order."""
    return listed_digest({file.relative_to(root).as_posix(): file_digest(file) for file in files})


def listed_digest(files: Mapping[str, str]) -> str:
    """Of the names and the digests of files, in their order: what `files_digest` is of the files themselves."""
    digest = hashlib.sha256()
    for name, sha256 in files.items():
        digest.update(f"{name}\0{sha256}\n".encode())
    return digest.hexdigest()


def directory_digest(path: Path) -> str:
    """Of the names, in order, and the contents of all files below `path`."""
    return files_digest(sorted(p for p in path.rglob("*") if p.is_file()), path)

"""SHA-256 of files, in hex: what says that bytes are the same."""

import hashlib
from collections.abc import Iterable
from pathlib import Path


def file_digest(path: Path) -> str:
    """Of one file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_digest(files: Iterable[Path], root: Path) -> str:
    """Of the names below `root` and the contents of these files, in their order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(root).as_posix()}\0{file_digest(file)}\n".encode())
    return digest.hexdigest()


def directory_digest(path: Path) -> str:
    """Of the names, in order, and the contents of all files below `path`."""
    return files_digest(sorted(p for p in path.rglob("*") if p.is_file()), path)

"""Files and directories that appear complete or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Gives a name beside `path` to write a file under, and moves it there at the end, also through a power cut; the directory is made.

    When the block raises, nothing is left behind and what was there stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Gives an empty directory beside `directory` to write into, and moves it there at the end; one that is there already is replaced.

    When the block raises, nothing is left behind and what was there stays.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        fresh = beside / "new"
        fresh.mkdir()
        yield fresh
        old = beside / "old"
        if directory.exists():
            directory.rename(old)
        try:
            fresh.rename(directory)
        except OSError:
            if old.exists():
                old.rename(directory)
            raise
    finally:
        shutil.rmtree(beside)

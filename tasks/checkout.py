"""The code that runs, as git knows it: its commit, and what it has beyond that."""

import itertools
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tasks import workspace

PATCH_BYTES = 1_000_000
"""Of a patch that is kept, at most."""
PATIENCE_SECONDS = 30.0
PLAIN = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--src-prefix=a/", "--dst-prefix=b/")
"""Whatever a person's own settings say."""

CODE = ("--", ".", ":(exclude)dvc.lock", ":(exclude)results")
"""Pathspec: what runs themselves bring up to date is no code."""

_FILE = re.compile(rb"^diff --git ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Patch:
    """What the code has beyond its commit, new files included; ignored files are not code."""

    text: bytes
    """`git apply`, on the commit, gives the code that ran, but for what was left out. Empty where nothing is beyond it."""
    left_out: list[str]
    """Files for which there was no room."""


def commit() -> str | None:
    """Git commit of the code; None where that is not known."""
    return git("rev-parse", "HEAD")


def uncommitted() -> bool | None:
    """Whether the code differs from its commit; None where that is not known."""
    status = git("status", "--porcelain", *CODE)
    return None if status is None else bool(status)


def git(*arguments: str) -> str | None:
    """What git prints about the checkout; None without git, or where the code is no git checkout."""
    answer = _git(*arguments)
    return None if answer is None else answer.decode(errors="replace").strip()


def patch() -> Patch | None:
    """The difference between the files as they lie there and the commit, up to `PATCH_BYTES`; None where there is no commit."""
    if commit() is None:
        return None
    listed = _git("ls-files", "--others", "--exclude-standard", "-z", *CODE) or b""
    new = [name for name in listed.decode(errors="surrogateescape").split("\0") if name]
    small = [name for name in new if (workspace.checkout() / name).lstat().st_size <= PATCH_BYTES]
    left_out = sorted(set(new).difference(small))
    with tempfile.TemporaryDirectory() as directory:
        # An index of our own: nobody's staged changes are touched, and no object is written.
        index = Path(directory) / "index"
        shutil.copyfile(workspace.checkout() / (git("rev-parse", "--git-path", "index") or ""), index)
        if small:
            _git("add", "--intent-to-add", "--", *small, index=index)
        whole = _git("diff", "HEAD", "--binary", *PLAIN, *CODE, index=index) or b""
    starts = [found.start() for found in _FILE.finditer(whole)]
    kept = b""
    for start, end in itertools.pairwise([*starts, len(whole)]):
        if len(kept) + end - start <= PATCH_BYTES:
            kept += whole[start:end]
        else:
            left_out.append(whole[start:end].splitlines()[0].decode(errors="replace").rpartition(" b/")[2])
    return Patch(kept, left_out)


def _git(*arguments: str, index: Path | None = None) -> bytes | None:
    environment = os.environ | ({"GIT_INDEX_FILE": str(index)} if index else {})
    command = ["git", "-C", str(workspace.checkout()), *arguments]
    try:
        return subprocess.run(command, capture_output=True, timeout=PATIENCE_SECONDS, check=True, env=environment).stdout
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None

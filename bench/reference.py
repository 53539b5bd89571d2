"""The environment in which a benchmark finds verl beside this project's packages."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from report import ROOT

ENVIRONMENT = ROOT / ".work" / "reference"


def inside() -> bool:
    """Whether this process runs there."""
    return Path(sys.prefix).resolve() == ENVIRONMENT.resolve()


def rerun(variables: Mapping[str, str]) -> int:
    """Makes the environment where it is not up to date, and runs the script with its arguments there, with these variables. Returns its exit code."""
    subprocess.run(["bash", ROOT / "requirements" / "reference.sh", sys.prefix], check=True)
    return subprocess.run([ENVIRONMENT / "bin" / "python", *sys.argv], env={**os.environ, **variables}, check=False).returncode

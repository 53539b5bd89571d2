"""`dvc repro` makes a recipe's data by the same code as a run, and does nothing while nothing has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

CHECKOUT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
STAGE = "prepare@grpo_tiny"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A DVC project of its own, with the checkout's stages and what they depend on."""
    shutil.copy(CHECKOUT / "dvc.yaml", tmp_path)
    for folder in ("conf", "tasks"):
        shutil.copytree(CHECKOUT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    dvc(tmp_path, "init", "--no-scm", "--quiet")
    return tmp_path


def dvc(project: Path, *arguments: str) -> str:
    environment = os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "ALMANAC_ROOT": str(project),
        "DVC_NO_ANALYTICS": "1",
        "DVC_GLOBAL_CONFIG_DIR": str(project / "dvc-global"),
        "DVC_SITE_CACHE_DIR": str(project / "dvc-site"),
    }
    done = subprocess.run([BIN / "dvc", *arguments], cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Mutation: leave `outs` out of dvc.yaml, or write the data set to another directory.
def test_repro_makes_the_data_once(project: Path) -> None:
    dvc(project, "repro", STAGE)
    train = parquet.read_table(project / "data/grpo_tiny/train.parquet")
    assert train.column_names == ["prompt", "data_source", "ability", "reward_model", "extra_info"]
    assert "up to date" in dvc(project, "status", STAGE)
    assert "Running stage" not in dvc(project, "repro", STAGE)
    # A changed dependency makes it run again.
    recipe = project / "conf/recipe/grpo_tiny.yaml"
    recipe.write_text(recipe.read_text() + "# changed\n")
    assert "Running stage" in dvc(project, "repro", STAGE)

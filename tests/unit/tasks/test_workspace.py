"""Where things lie, and the environment that keeps libraries quiet."""

import os
from pathlib import Path

import pytest

from tasks import workspace


def test_root_is_the_checkout_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ALMANAC_ROOT", raising=False)
    assert workspace.root() == workspace.checkout() == Path(__file__).parents[3]
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    assert workspace.run_directory("r-1") == tmp_path / ".work" / "runs" / "r-1"
    assert workspace.data_directory("d") == tmp_path / "data" / "d"
    assert workspace.conf_directory() == Path(__file__).parents[3] / "conf"


def test_a_relative_root_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray's workers have another working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALMANAC_ROOT", "here")
    assert workspace.root() == tmp_path / "here"


def test_quiet_environment_keeps_what_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Mutation: `os.environ[name] = value` instead of `setdefault`."""
    monkeypatch.setattr(os, "environ", {"ALMANAC_ROOT": str(tmp_path), "PREFECT_HOME": "/elsewhere", "RAY_USAGE_STATS_ENABLED": "1"})
    workspace.quiet_environment()
    assert os.environ["PREFECT_HOME"] == "/elsewhere"
    assert os.environ["PREFECT_LOCAL_STORAGE_PATH"] == "/elsewhere/storage"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1"
    # MLflow takes no other word.
    assert os.environ["DO_NOT_TRACK"] == "true"
    # A user may load models by hub name, and records to the server of his choice.
    assert not {"HF_HUB_OFFLINE", "MLFLOW_TRACKING_URI", "PREFECT_API_URL"} & set(os.environ)


def test_a_run_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Mutation: leave it to Prefect, whose three minutes are too near to the five after which a silent run counts as dead.
    monkeypatch.setattr(os, "environ", {"ALMANAC_ROOT": str(tmp_path)})
    workspace.quiet_environment()
    assert os.environ["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"

"""Updates whose gradient was not finite: kept, told, and too many of them stop the run."""

from pathlib import Path
from typing import Any

import pytest

from engine.config import OptimizerConfig
from engine.events import UpdatesSkipped
from engine.trainer.skips import NonFiniteGradientError, look_at_skips

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, max_consecutive_skips=3)


def look(run: Path, skipped: int, in_a_row: int) -> list[Any]:
    """What is told, and where the batch was kept."""
    told: list[Any] = []
    metrics = {"critic/skipped_updates": float(skipped), "critic/consecutive_skips": float(in_a_row)}
    look_at_skips(metrics, "critic", OPTIMIZER, run, "rl", 7, lambda directory: told.append(directory), told.append)
    return told


def test_a_step_without_skips_keeps_nothing(tmp_path: Path) -> None:
    # Mutation: keep the batch of every step.
    assert look(tmp_path, 0, 0) == []


def test_the_batch_is_kept_and_its_place_told(tmp_path: Path) -> None:
    # Mutation: one directory for all steps, or for policy and critic.
    place = tmp_path / "skipped" / "rl" / "step_000007" / "critic"
    assert look(tmp_path, 2, 2) == [place, UpdatesSkipped(stage="rl", step=7, trained="critic", updates=2, directory=str(place))]


def test_too_many_in_a_row_stop_the_run(tmp_path: Path) -> None:
    # Mutations: count skips of the step instead of those in a row; `>`; raise before the batch is kept.
    assert len(look(tmp_path, 5, 2)) == 2
    with pytest.raises(
        NonFiniteGradientError, match=r"stage rl, step 7: 3 optimizer steps of the critic in a row .*max_consecutive_skips=3.*step_000007/critic"
    ):
        look(tmp_path, 1, 3)

"""What becomes of optimizer steps whose gradient was not finite: told, kept for inspection, and not suffered for ever."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.config import OptimizerConfig
from engine.events import Emit, UpdatesSkipped


class NonFiniteGradientError(RuntimeError):
    """Too many optimizer steps in a row had a gradient norm that was not finite."""


def look_at_skips(
    metrics: Mapping[str, float], prefix: str, optimizer: OptimizerConfig, run: Path, stage: str, step: int, keep: Callable[[Path], Any], emit: Emit
) -> None:
    """Keeps the batch of a step that skipped updates, and says where; does nothing for any other step.

    Args:
        metrics: of the step, with PREFIX/skipped_updates and PREFIX/consecutive_skips.
        prefix: `policy` or `critic`.
        optimizer: whose updates they were.
        run: the run's directory; the batch goes to `skipped/STAGE/step_NNNNNN/PREFIX` inside it.
        stage, step: named in what is told.
        keep: writes the batch into a directory.
        emit: is told `UpdatesSkipped`.

    Raises:
        NonFiniteGradientError: so many updates in a row were skipped as the optimizer's settings allow; names stage, step and the directory.
    """
    if not metrics[f"{prefix}/skipped_updates"]:
        return
    directory = run / "skipped" / stage / f"step_{step:06d}" / prefix
    keep(directory)
    emit(UpdatesSkipped(stage=stage, step=step, trained=prefix, updates=int(metrics[f"{prefix}/skipped_updates"]), directory=str(directory)))
    in_a_row = int(metrics[f"{prefix}/consecutive_skips"])
    if in_a_row >= optimizer.max_consecutive_skips:
        raise NonFiniteGradientError(
            f"stage {stage}, step {step}: {in_a_row} optimizer steps of the {prefix} in a row had a gradient norm that was not finite "
            f"(optimizer.max_consecutive_skips={optimizer.max_consecutive_skips}). Their weights are those before; the last batch is in {directory}. "
            f"Look for what is not finite in it, or lower optimizer.learning_rate."
        )

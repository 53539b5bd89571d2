"""What a step's rewards were made of."""

from engine.batch import Batch
from engine.metrics import Mean, Statistics


def reward_statistics(batch: Batch) -> Statistics:
    """Failures, and the mean of every part.

    Args:
        batch: objects reward_status and reward_parts, as `RewardWorker.score` gives them; without them nothing is known.

    Returns:
        `reward/timeout_fraction` and `reward/error_fraction`; `reward/NAME_mean` of the samples that have a part or a further number NAME.
    """
    statistics, statuses = Statistics(), batch.objects.get("reward_status", [])
    for status in ("timeout", "error"):
        if statuses:
            statistics.add(f"reward/{status}_fraction", Mean.of(float(found == status) for found in statuses))
    for parts in batch.objects.get("reward_parts", []):
        for name, value in parts.items():
            statistics.add(f"reward/{name}_mean", Mean(value, 1))
    return statistics

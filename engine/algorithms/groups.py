"""Statistics of the rewards within each group (the samples of one prompt in one step)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.metrics import Statistics, Sum


@dataclass(frozen=True, slots=True)
class Groups:
    """Rewards by group, G groups in all, in float64. Samples that are not valid count nowhere."""

    index: Tensor
    """[B] int64: which of the G groups a sample belongs to."""
    size: Tensor
    """[G] valid samples."""
    mean: Tensor
    """[G]; 0 for a group without a valid sample."""
    informative: Tensor
    """[G] bool: at least two valid samples and two different rewards."""

    @classmethod
    def of(cls, rewards: Tensor, group: Tensor, valid: Tensor) -> "Groups":
        """From rewards [B], group [B] int64 and valid [B] bool. Rewards of samples that are not valid may be NaN."""
        assert rewards.shape == group.shape == valid.shape, (rewards.shape, group.shape, valid.shape)
        numbers, index = torch.unique(group, return_inverse=True)
        groups = len(numbers)
        # float64: the mean is then the same to float32's last bit whatever the order in which a device adds.
        values = torch.where(valid, rewards, 0).double()
        size = values.new_zeros(groups).index_add(0, index, valid.double())
        mean = values.new_zeros(groups).index_add(0, index, values) / size.clamp(min=1)
        largest = values.new_full((groups,), -torch.inf).scatter_reduce(0, index, values.where(valid, -torch.inf), "amax")
        smallest = values.new_full((groups,), torch.inf).scatter_reduce(0, index, values.where(valid, torch.inf), "amin")
        return cls(index=index, size=size, mean=mean, informative=largest > smallest)


def group_statistics(rewards: Tensor, group: Tensor, valid: Tensor) -> Statistics:
    """How many groups of a step teach nothing to a group-relative estimator.

    Args:
        rewards: [B] outcome scores.
        group: [B] int64.
        valid: [B] bool, samples with at least one response token.

    Returns:
        `data/zero_signal_groups`: groups whose valid samples all have the same reward; of these, `data/single_sample_groups` have at most
        one valid sample.
    """
    groups = Groups.of(rewards, group, valid)
    statistics = Statistics()
    statistics.add("data/zero_signal_groups", Sum(float((~groups.informative).sum())))
    statistics.add("data/single_sample_groups", Sum(float((groups.size < 2).sum())))
    return statistics

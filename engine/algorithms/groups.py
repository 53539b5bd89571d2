"""Statistics of the rewards within each group (the samples of one prompt in one step)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algorithms.types import AdvantageInputs
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
    centred: Tensor
    """[B] reward minus the mean of its group; exactly 0 in a group that is not informative, and for a sample that is not valid."""
    valid: Tensor
    """[B] bool: which samples count."""

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
        informative = largest > smallest
        centred = torch.where(valid & informative[index], values - mean[index], 0)
        return cls(index=index, size=size, mean=mean, informative=informative, centred=centred, valid=valid)

    @classmethod
    def of_outcomes(cls, inputs: AdvantageInputs, estimator: str) -> "Groups":
        """For an estimator that knows one reward a sample. ValueError where tokens have rewards of their own."""
        if inputs.token_rewards is not None:
            raise ValueError(
                f"algorithm.advantage.estimator={estimator} knows one reward a sample, and tokens have rewards of their own; "
                "set algorithm.kl.place=loss"
            )
        return cls.of(inputs.rewards, inputs.group, inputs.valid)


def deviations(values: Tensor, valid: Tensor, index: Tensor) -> Tensor:
    """Standard deviation, ddof = 1, of the valid values [B] that share an `index` [B] (from 0 on): for each row, [B] float64; 0 of one value."""
    values, weight = torch.where(valid, values, 0).double(), valid.double()
    zeros = weight.new_zeros(int(index.max()) + 1 if len(index) else 0)
    size = zeros.index_add(0, index, weight)
    mean = zeros.index_add(0, index, values) / size.clamp(min=1)
    squares = zeros.index_add(0, index, torch.where(valid, values - mean[index], 0).square())
    return (squares / (size - 1).clamp(min=1)).sqrt()[index]


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

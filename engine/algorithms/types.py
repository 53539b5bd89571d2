"""What advantage estimators and policy losses take and give. All token tensors are [B, T], value t belonging to token t."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from engine.metrics import Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """The samples of one step, all ranks together."""

    rewards: Tensor
    """[B] outcome scores."""
    group: Tensor
    """[B] int64; samples of one prompt share a number."""
    mask: Tensor
    """[B, T] bool, True on response tokens."""
    token_rewards: Tensor | None = None
    """[B, T] rewards by token beside the outcome, such as a KL penalty. Whatever stands outside the mask has no effect."""
    values: Tensor | None = None
    """[B, T] of a critic at the start of the step, of the state before each token; None without one."""
    greedy_rewards: Tensor | None = None
    """[B] outcome score of the greedy answer to the sample's prompt."""
    old_log_probs: Tensor | None = None
    """[B, T] of the policy at the start of the step."""
    squared_probabilities: Tensor | None = None
    """[B, T] sum over the vocabulary of the squared probabilities from which each token was drawn, by the policy at the start of the step."""
    mini_batch: Tensor | None = None
    """[B] int64, from 0 on: the optimizer step that the sample falls into."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """What annotators added, [B, ...] each, by column name."""

    @property
    def valid(self) -> Tensor:
        """[B] bool: samples with at least one response token. The others earn nothing and disturb no one."""
        return self.mask.any(dim=1)

    def needed(self, name: str, remedy: str) -> Tensor:
        """The input called `name`; ValueError with the remedy where the step does not have it."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"the step has no {name}; {remedy}")
        return value


@dataclass(frozen=True, slots=True)
class Advantages:
    """What an estimator makes of a step."""

    advantages: Tensor
    """[B, T], 0 where the mask is False."""
    returns: Tensor | None = None
    """[B, T], 0 where the mask is False: what a critic is trained to foresee; None of an estimator that reads no values."""

    @classmethod
    def of_samples(cls, values: Tensor, inputs: AdvantageInputs) -> Self:
        """The value [B] of each sample on every one of its response tokens, in the type of the rewards."""
        return cls(torch.where(inputs.mask, values.to(inputs.rewards.dtype)[:, None], 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch. Log-probs are of `logits / temperature` with the rollout's temperature."""

    log_probs: Tensor
    """[B, T] of the policy being trained; the only input with a gradient."""
    old_log_probs: Tensor
    """[B, T] of the policy at the start of the step."""
    rollout_log_probs: Tensor
    """[B, T] as the rollout engine reported them."""
    advantages: Tensor
    """[B, T]."""
    mask: Tensor
    """[B, T] bool, True on response tokens. Whatever stands elsewhere, -inf and NaN included, has no effect."""
    selected: Tensor | None = None
    """[B, T] bool: tokens that were chosen from the whole step, for a loss that treats some differently (`SELECTIONS`)."""

    def needed_selection(self) -> Tensor:
        """`selected`; ValueError where the step selected nothing."""
        if self.selected is None:
            raise ValueError("selected is missing; tokens are selected by the loss's name, so give that of a loss in SELECTIONS")
        return self.selected


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """A loss of the policy or of the critic before aggregation."""

    per_token: Tensor
    """[B, T], 0 where the mask is False."""
    statistics: Statistics = field(default_factory=Statistics)


# The second argument is the member of the union `AdvantageConfig`, or `LossConfig`, that the name stands for.
AdvantageFunction = Callable[[AdvantageInputs, Any], Advantages]
LossFunction = Callable[[LossInputs, Any], LossTerms]
SelectionFunction = Callable[[Tensor, Any, np.random.Generator], Tensor]
"""From the covariance [N] of each response token of a step, the loss's configuration and random numbers, to the tokens chosen, [N] bool."""

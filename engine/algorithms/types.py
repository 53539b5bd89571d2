"""What advantage estimators and policy losses take and give. All token tensors are [B, T], value t belonging to token t."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from engine.config import AdvantageConfig, LossConfig
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

    @property
    def valid(self) -> Tensor:
        """[B] bool: samples with at least one response token. The others earn nothing and disturb no one."""
        return self.mask.any(dim=1)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """A policy loss before aggregation."""

    per_token: Tensor
    """[B, T], 0 where the mask is False."""
    statistics: Statistics = field(default_factory=Statistics)


AdvantageFunction = Callable[[AdvantageInputs, AdvantageConfig], Tensor]
"""Gives advantages [B, T], 0 where the mask is False."""
LossFunction = Callable[[LossInputs, LossConfig], LossTerms]

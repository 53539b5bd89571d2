"""What advantage estimators and policy losses take and give. All token tensors are [B, T], value t belonging to token t."""

from collections.abc import Callable, Mapping
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
    token_rewards: Tensor | None = None
    """[B, T] rewards by token beside the outcome, such as a KL penalty. Whatever stands outside the mask has no effect."""
    values: Tensor | None = None
    """[B, T] of a critic at the start of the step, of the state before each token; None without one."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """What annotators added, [B, ...] each, by column name."""

    @property
    def valid(self) -> Tensor:
        """[B] bool: samples with at least one response token. The others earn nothing and disturb no one."""
        return self.mask.any(dim=1)


@dataclass(frozen=True, slots=True)
class Advantages:
    """What an estimator makes of a step."""

    advantages: Tensor
    """[B, T], 0 where the mask is False."""
    returns: Tensor | None = None
    """[B, T], 0 where the mask is False: what a critic is trained to foresee; None of an estimator that reads no values."""


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
    """A loss of the policy or of the critic before aggregation."""

    per_token: Tensor
    """[B, T], 0 where the mask is False."""
    statistics: Statistics = field(default_factory=Statistics)


AdvantageFunction = Callable[[AdvantageInputs, AdvantageConfig], Advantages]
LossFunction = Callable[[LossInputs, LossConfig], LossTerms]

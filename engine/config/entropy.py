"""A bonus on the policy's entropy."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from engine.config.base import Settings


class AdaptiveEntropyConfig(Settings):
    """Adaptive entropy control of Skywork-OR1 (arXiv:2505.22312): the coefficient rises by `step` after each step whose entropy lies below the
    target, and falls by it after each whose entropy lies above; there is a bonus only while the entropy is not above the target."""

    target: Annotated[float, Field(gt=0)]
    """nats per response token, at the rollout's temperature."""
    step: Annotated[float, Field(gt=0)] = 0.005
    maximum: Annotated[float, Field(gt=0)] = 0.1
    """The coefficient stays within 0 and this."""


class EntropyConfig(Settings):
    """The policy's entropy, aggregated as the policy loss and multiplied by a coefficient, is subtracted from the loss."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Nats are multiplied by it; where it is `adaptive`, at first."""
    adaptive: AdaptiveEntropyConfig | None = None

    @model_validator(mode="after")
    def _acts(self) -> Self:
        if self.adaptive is None and self.coefficient == 0:
            raise ValueError("a bonus with coefficient=0 has no effect; set entropy.coefficient, or entropy.adaptive.target")
        if self.adaptive is not None and self.coefficient > self.adaptive.maximum:
            raise ValueError(f"coefficient={self.coefficient:g} is above adaptive.maximum={self.adaptive.maximum:g}; lower it, or raise that")
        return self

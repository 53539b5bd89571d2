"""Correction for a rollout engine that computes another distribution than the trainer."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.config.base import Settings

Level = Literal["token", "sequence", "geometric"]


class ImportanceWeightsConfig(Settings):
    """The policy loss is weighted by min(ratio, cap), ratio = trainer's / rollout's probability (Ionides 2008; Yao et al. 2025)."""

    level: Level = "token"
    """Ratio of each token, of the whole response (`sequence`, the product over its tokens) or the geometric mean over its tokens."""
    cap: Annotated[float, Field(ge=1)] = 2.0
    """Larger ratios count as this one."""


class RejectionConfig(Settings):
    """What trainer and rollout disagree about too much is taken out before the advantages: it is in no group's statistics and in no loss."""

    unit: Literal["token", "sequence", "group"] = "sequence"
    """What is taken out where a ratio lies outside of the bounds: the token, its whole response, or all responses to its prompt."""
    level: Level = "geometric"
    """Which ratio is compared; unit=token compares those of tokens."""
    low: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Least trainer's / rollout's probability that is kept."""
    high: Annotated[float, Field(gt=1)] = 2.0
    """Largest one that is kept."""

    @model_validator(mode="after")
    def _level_fits(self) -> Self:
        if self.unit == "token" and self.level != "token":
            raise ValueError(f"unit=token takes out single tokens, and level={self.level} is one ratio a response; set level=token, or unit=sequence")
        return self


class OffPolicyConfig(Settings):
    """Correction for a rollout engine that computes another distribution than the trainer: at least one of both."""

    weights: ImportanceWeightsConfig | None = None
    rejection: RejectionConfig | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.weights is None and self.rejection is None:
            raise ValueError("off_policy corrects nothing without weights or rejection; set one, such as off_policy.weights.level=token")
        return self

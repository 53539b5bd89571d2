"""Policy losses: what turns advantages into a gradient."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine.config.base import Positive, Settings, known


class LossConfig(Settings):
    """Clipped policy loss (PPO, arXiv:1707.06347, equation 7), asymmetric (DAPO, arXiv:2503.14476) and dual (arXiv:1912.09729)."""

    name: str = "ppo"
    """`ppo`, or `module:function` of one's own."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Bound on ratio x |advantage| for negative advantages; null leaves it out."""
    aggregation: Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "sequence_sum_constant"] = "token_mean"
    aggregation_constant_tokens: Positive | None = None
    """Tokens that `sequence_sum_constant` divides each sequence's sum by (Dr. GRPO); refused for the other aggregations."""

    @model_validator(mode="after")
    def _constant_where_used(self) -> Self:
        if (self.aggregation == "sequence_sum_constant") != (self.aggregation_constant_tokens is not None):
            raise ValueError("aggregation_constant_tokens goes with aggregation=sequence_sum_constant, and only with it")
        return self

    parameters: dict[str, Any] = {}
    """Of a loss of one's own."""

    @model_validator(mode="after")
    def _known_loss(self) -> Self:
        from engine.algorithms.registry import LOSSES

        known(LOSSES, "name", self.name)
        if self.parameters and self.name in LOSSES.names():
            raise ValueError(f"parameters would have no effect on loss {self.name}; they are for a loss of one's own (module:function)")
        return self

"""Advantage estimators: what turns the scores of a step into an advantage of each token."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from engine.config.base import Settings, known


class AdvantageConfig(Settings):
    """An advantage estimator and its parameters; those of another estimator are refused."""

    estimator: str = "grpo"
    """`grpo` (Shao et al. 2024, arXiv:2402.03300), `gae` (Schulman et al. 2016, arXiv:1506.02438), or `module:function` of one's own."""
    scale: Literal["group", "batch", "none"] = "group"
    """Of grpo: what centred rewards are divided by, the standard deviation of the group or of the batch, or nothing (Dr. GRPO, arXiv:2503.20783)."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of gae: discount of the reward by response token."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Of gae: 0 trusts the critic's next value, 1 the rewards alone."""
    whiten: bool = True
    """Of gae: advantages of a step get mean 0 and deviation 1 over its response tokens."""
    parameters: dict[str, Any] = {}
    """Of an estimator of one's own."""

    APPLIES: ClassVar = {"grpo": {"scale"}, "gae": {"gamma", "lam", "whiten"}}

    @model_validator(mode="after")
    def _applies(self) -> Self:
        from engine.algorithms.registry import ADVANTAGES

        known(ADVANTAGES, "estimator", self.estimator)
        applies = {"estimator", *self.APPLIES.get(self.estimator, {"parameters"})}
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        if foreign := [name for name in defaults if name not in applies and getattr(self, name) != defaults[name]]:
            raise ValueError(
                f"{', '.join(foreign)} would have no effect on estimator {self.estimator}; leave them out. It takes: {', '.join(sorted(applies))}"
            )
        return self

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator reads values."""
        return self.estimator == "gae"

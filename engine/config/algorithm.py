"""What turns scores into a gradient."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.config.advantage import AdvantageConfig
from engine.config.base import Settings
from engine.config.loss import LossConfig
from engine.config.off_policy import OffPolicyConfig
from engine.config.training import OptimizerConfig


class KLConfig(Settings):
    """A penalty on the distance from the reference, which is the policy that the stage began with."""

    coefficient: Annotated[float, Field(gt=0)]
    """Nats are multiplied by it."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Schulman 2020, "Approximating KL Divergence"."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: a term beside the policy loss, with a gradient. `reward`: subtracted from the reward of each response token; only for gae."""


class CriticConfig(Settings):
    """A value model of the policy's architecture, trained beside it (PPO, arXiv:1707.06347, section 5)."""

    optimizer: OptimizerConfig
    clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Values may move by so much from those of the step's start before the loss holds them back; null leaves it out."""


class AlgorithmConfig(Settings):
    """What turns scores into a gradient."""

    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    kl: KLConfig | None = None
    off_policy: OffPolicyConfig | None = None
    critic: CriticConfig | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.advantage.needs_critic and self.critic is None:
            raise ValueError(f"advantage.estimator={self.advantage.estimator} reads a critic's values; set critic.optimizer.learning_rate")
        if self.critic is not None and self.advantage.estimator == "grpo":
            raise ValueError("critic: advantage.estimator=grpo reads no values; leave critic out, or set advantage.estimator=gae")
        if self.kl is not None and self.kl.place == "reward" and self.advantage.estimator == "grpo":
            raise ValueError(
                "kl.place=reward gives every token a reward of its own, and advantage.estimator=grpo knows one a sample; set kl.place=loss"
            )
        return self

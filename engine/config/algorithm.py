"""What turns scores into a gradient."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from engine.config.advantage import AdvantageConfig, GRPOAdvantageConfig
from engine.config.base import Settings
from engine.config.entropy import EntropyConfig
from engine.config.kl import KLConfig
from engine.config.loss import LossConfig, PPOLossConfig
from engine.config.off_policy import OffPolicyConfig
from engine.config.training import OptimizerConfig


class CriticConfig(Settings):
    """A value model of the policy's architecture, trained beside it (PPO, arXiv:1707.06347, section 5)."""

    optimizer: OptimizerConfig
    clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Values may move by so much from those of the step's start before the loss holds them back; null leaves it out."""


class AlgorithmConfig(Settings):
    """What turns scores into a gradient."""

    advantage: AdvantageConfig = GRPOAdvantageConfig()
    """What turns the rewards of a step into an advantage of each token, chosen by `estimator`. Another one's parameters are refused."""
    loss: LossConfig = PPOLossConfig()
    """What turns advantages into a gradient, chosen by `name`."""
    kl: KLConfig | None = None
    entropy: EntropyConfig | None = None
    off_policy: OffPolicyConfig | None = None
    critic: CriticConfig | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        estimator = f"advantage.estimator={self.advantage.estimator}"
        if self.advantage.needs_critic and self.critic is None:
            raise ValueError(f"{estimator} reads a critic's values; set critic.optimizer.learning_rate")
        if self.critic is not None and not self.advantage.reads_values:
            raise ValueError(f"critic: {estimator} reads no values; leave critic out, or set advantage.estimator=gae")
        if self.kl is not None and self.kl.place == "reward" and not self.advantage.reads_token_rewards:
            raise ValueError(f"kl.place=reward gives every token a reward of its own, and {estimator} knows one a sample; set kl.place=loss")
        if self.off_policy is not None and self.off_policy.weights is not None and self.loss.ratio_to_rollout:
            raise ValueError(f"off_policy.weights would count twice what the ratio of loss.name={self.loss.name} holds; leave one of them out")
        return self

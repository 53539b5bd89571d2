"""What turns scores into a gradient."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from engine.config.base import Positive, Settings, known
from engine.config.training import OptimizerConfig


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


class AnnotatorConfig(Settings):
    """A worker role of one's own, or a reward model: looks at every rollout and adds columns to it."""

    worker: str
    """`reward_model`, or `module:Class` of one's own (`engine.workers.base.Annotator`)."""
    parameters: dict[str, Any] = {}
    """What its constructor is given beside its place."""
    reward_weight: float = 0.0
    """Its column `score` times this is added to the reward."""

    @model_validator(mode="after")
    def _known_worker(self) -> Self:
        from engine.workers.registry import ANNOTATORS

        known(ANNOTATORS, "worker", self.worker)
        return self


RewardName = str


class RewardConfig(Settings):
    """How a response is scored."""

    by_data_source: dict[str, RewardName] = {}
    """Reward function for each value of the `data_source` column: a name from `almanac list`, or `module:function` of one's own."""
    default: RewardName = "math_verify"
    """Reward function of every other data source."""
    shuffle: bool = False
    """Control arm: deal the scores of a step out at random among its samples. A run that still learns is leaking."""

    @model_validator(mode="after")
    def _known_rewards(self) -> Self:
        from engine.rewards.registry import REWARDS

        known(REWARDS, "default", self.default)
        for source, name in self.by_data_source.items():
            known(REWARDS, f"by_data_source.{source}", name)
        return self

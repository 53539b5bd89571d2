"""How responses are scored, by functions and by models."""

from typing import Any, Self

from pydantic import model_validator

from engine.config.base import Settings, known


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

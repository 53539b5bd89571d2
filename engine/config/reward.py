"""How responses are scored, by functions and by models."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine.config.base import Positive, Settings, known


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


class RewardRunnerConfig(Settings):
    """The processes that rewards run in; each rank of the reward role has its own."""

    processes: Positive = 2
    """So many samples are scored at the same time. Where n samples of a step hang, they take n / processes times the time limit."""
    time_limit_seconds: Annotated[float, Field(gt=0)] = 10.0
    """For one sample, from the moment at which its reward is called. The process is killed then, and the sample's status is `timeout`."""
    memory_limit_megabytes: Annotated[float, Field(gt=0)] = 1_000.0
    """Address space that a process may take beyond what it has when its functions are loaded. Asking for more raises MemoryError in the function."""


class RewardConfig(Settings):
    """How a response is scored."""

    by_data_source: dict[str, RewardName] = {}
    """Reward function for each value of the `data_source` column: a name from `almanac list`, or `module:function` of one's own."""
    default: RewardName = "math_verify"
    """Reward function of every other data source."""
    on_failure: Literal["zero", "exclude"] = "zero"
    """What a sample earns whose reward times out or fails: `zero`, or nothing: `exclude` takes it out of the statistics of its group and out of the
    loss. Either way it is counted, and shown with its status."""
    max_failure_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The run stops when more than this share of a step's samples have no score; 1 goes on whatever happens."""
    runner: RewardRunnerConfig = RewardRunnerConfig()
    shuffle: bool = False
    """Control arm: deal the scores of a step out at random among its samples. A run that still learns is leaking."""

    @model_validator(mode="after")
    def _known_rewards(self) -> Self:
        from engine.rewards.registry import REWARDS

        known(REWARDS, "default", self.default)
        for source, name in self.by_data_source.items():
            known(REWARDS, f"by_data_source.{source}", name)
        return self

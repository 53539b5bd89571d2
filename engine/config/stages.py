"""The stages of a recipe, and what the engine's workers are given."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.config.algorithm import AlgorithmConfig
from engine.config.base import Name, Positive, Settings
from engine.config.resources import ResourcesConfig
from engine.config.reward import AnnotatorConfig, RewardConfig
from engine.config.rollout import RolloutConfig, SamplingConfig
from engine.config.training import StageTrainingConfig, TrainingConfig


class EvaluationConfig(Settings):
    """Greedy and sampled accuracy on a held-out set, with bootstrap confidence intervals over prompts."""

    samples_per_prompt: Positive = 8
    """k of avg@k."""
    sampling: SamplingConfig = SamplingConfig()
    max_prompts: Positive | None = None
    """Evaluate on the first so many prompts of the split; null takes all."""
    max_response_tokens: Positive = 96
    bootstrap_resamples: Positive = 2000
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95


class SFTStageConfig(Settings):
    """Supervised fine-tuning on `messages`, loss on assistant tokens only."""

    kind: Literal["sft"]
    steps: Positive
    rows_per_step: Positive = 96
    """Conversations of one optimizer step, over all ranks."""
    max_tokens: Positive = 128
    """Longest conversation; longer ones are dropped and counted."""
    training: StageTrainingConfig


class RLStageConfig(Settings):
    """Reinforcement learning with verified rewards."""

    kind: Literal["rl"]
    steps: Positive
    """Rollout batches; each is followed by its updates and a synchronisation."""
    prompts_per_step: Positive
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    updates_per_step: Positive = 1
    """Optimizer steps (mini-batches) that one rollout batch is cut into."""
    max_prompt_tokens: Positive
    """Longer prompts are dropped and counted."""
    max_response_tokens: Positive
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    training: StageTrainingConfig
    samples_table_every_steps: Positive = 20
    """How often some of a step's generations are recorded as a table; the first and the last step always are."""
    keep_calls_every_steps: Positive | None = None
    """How often a step's calls are kept with the state that they began with, for `almanac replay`; the first and the last step are then kept too.
    A kept step takes as much disk as the trained weights and their optimizer. null keeps none."""

    @model_validator(mode="after")
    def _updates_divide(self) -> Self:
        if self.prompts_per_step % self.updates_per_step:
            raise ValueError(f"prompts_per_step ({self.prompts_per_step}) must be a multiple of updates_per_step ({self.updates_per_step})")
        return self

    @model_validator(mode="after")
    def _whole_distribution(self) -> Self:
        # The trainer's log-probs are over the whole vocabulary: of a truncated distribution they would be another policy's.
        if self.sampling.top_p < 1 or self.sampling.top_k > 0 or self.sampling.min_p > 0:
            raise ValueError("sampling.top_p, sampling.top_k and sampling.min_p must stay 1.0, 0 and 0.0 in an RL stage; they are for evaluation")
        return self


class EngineConfig(Settings):
    """What every worker is given, and whose digest every worker confirms."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_context_tokens: Positive
    """Longest prompt plus response of any stage or evaluation: the rollout engine's context."""
    resources: ResourcesConfig = ResourcesConfig()
    rollout: RolloutConfig = RolloutConfig()
    training: TrainingConfig = TrainingConfig()
    reference: bool = False
    """Some stage measures its distance from the policy that it began with."""
    critic: bool = False
    """Some stage reads values."""
    annotators: dict[Name, AnnotatorConfig] = {}
    """Roles that add columns to every rollout, by name."""

    @property
    def has_reference_role(self) -> bool:
        """With LoRA the policy is its own reference, with the adapter off."""
        return self.reference and self.training.lora is None

    def roles(self) -> list[str]:
        """Roles that need workers."""
        optional = [("reference", self.has_reference_role), ("critic", self.critic)]
        return ["actor", "reward", *(role for role, needed in optional if needed), *self.annotators]

"""The stages of a recipe, and what the engine's workers are given."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.config.algorithm import AlgorithmConfig
from engine.config.base import Name, Positive, Settings
from engine.config.ends import EndsConfig
from engine.config.groups import FilterGroups, GroupsConfig, KeepGroups, RescueConfig
from engine.config.length import LengthExtensionConfig
from engine.config.resources import ResourcesConfig
from engine.config.reward import AnnotatorConfig, RewardConfig
from engine.config.rollout import RolloutConfig, SamplingConfig
from engine.config.training import StageTrainingConfig, TrainingConfig
from engine.config.truncated import KeepTruncated, OverlongPenalty, TruncatedConfig


class EvaluationConfig(Settings):
    """Greedy and sampled accuracy on a held-out set, with bootstrap confidence intervals over prompts."""

    samples_per_prompt: Positive = 8
    """k of avg@k."""
    sampling: SamplingConfig = SamplingConfig()
    max_prompts: Positive | None = None
    """Evaluate on the first so many prompts of the split; null takes all."""
    max_response_tokens: Positive = 96
    length_extension: LengthExtensionConfig | None = None
    """Of what evaluations generate, and of nothing else; null leaves the model's positions as they are."""
    bootstrap_resamples: Positive = 2000
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95


class SFTValidationConfig(Settings):
    """The loss on conversations that are not trained on."""

    every_steps: Positive
    """How often it is taken; at the end of the stage it always is."""
    held_out_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the conversations, chosen by content hash: neither the seed nor the order of the rows changes which."""


class SFTStageConfig(Settings):
    """Supervised fine-tuning on `messages`, loss on assistant tokens only."""

    kind: Literal["sft"]
    steps: Positive | None = None
    """Optimizer steps; set this or `epochs`."""
    epochs: Positive | None = None
    """Times that each conversation is visited; the last step takes what is left."""
    rows_per_step: Positive = 96
    """Conversations of one optimizer step, over all ranks. Where a chat template rewrites earlier turns, a row is one answer of a conversation."""
    max_tokens: Positive = 128
    """Longest row; longer ones are dropped and counted."""
    validation: SFTValidationConfig | None = None
    """null holds nothing out."""
    training: StageTrainingConfig

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"set exactly one of steps and epochs; steps is {self.steps}, epochs is {self.epochs}")
        return self

    def total_steps(self, rows: int) -> int:
        """Optimizer steps over so many rows."""
        return self.steps or -(-(self.epochs or 0) * rows // self.rows_per_step)


class RLStageConfig(Settings):
    """Reinforcement learning with verified rewards."""

    kind: Literal["rl"]
    steps: Positive
    """Rollout batches; each is followed by its updates and a synchronisation. With `ends` it is the most that the stage does."""
    ends: EndsConfig = EndsConfig()
    prompts_per_step: Positive
    samples_per_prompt: Positive = 8
    """1 suits estimators that compare no samples with each other, such as gae."""
    updates_per_step: Positive = 1
    """Optimizer steps (mini-batches) that one rollout batch is cut into."""
    prompts: Name | None = None
    """Stage before this one whose prompts are trained on; null takes those of the train split."""
    max_prompt_tokens: Positive
    """Longer prompts are dropped and counted."""
    max_response_tokens: Positive
    length_extension: LengthExtensionConfig | None = None
    """Of this stage: of what it generates and of what it trains alike. null leaves the model's positions as they are."""
    groups: GroupsConfig = KeepGroups()
    """What is done about groups without signal: those whose valid samples all have the same outcome."""
    rescue: RescueConfig | None = None
    """Before that: a remembered right response for groups in which every sample is wrong; null leaves it out."""
    truncated: TruncatedConfig = KeepTruncated()
    """What is done about answers that reach `max_response_tokens` before their end."""
    sampling: SamplingConfig = SamplingConfig()
    temperature_from: Name | None = None
    """Stage of kind temperature_search before this one whose temperature is sampled at, in the place of `sampling.temperature`."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    training: StageTrainingConfig
    samples_table_every_steps: Positive = 20
    """How often some of a step's generations are recorded as a table; the first and the last step always are."""
    keep_calls_every_steps: Positive | None = None
    """How often a step's calls are kept with the state that they began with, for `almanac replay`; the first and the last planned step are then kept
    too. A kept step takes as much disk as the trained weights and their optimizer. null keeps none."""

    @model_validator(mode="after")
    def _updates_divide(self) -> Self:
        if self.prompts_per_step % self.updates_per_step:
            raise ValueError(f"prompts_per_step ({self.prompts_per_step}) must be a multiple of updates_per_step ({self.updates_per_step})")
        return self

    @model_validator(mode="after")
    def _ends_can_come(self) -> Self:
        if (convergence := self.ends.convergence) is not None:
            needed = max(convergence.min_steps, convergence.window_steps)
            if needed >= self.steps:
                raise ValueError(
                    f"ends.convergence looks at nothing before step {needed} (min_steps={convergence.min_steps}, window_steps="
                    f"{convergence.window_steps}), and the stage ends by steps={self.steps} anyway; lower them, or leave ends.convergence out"
                )
        if (collapse := self.ends.collapse) is not None and collapse.patience_steps > self.steps:
            raise ValueError(f"ends.collapse.patience_steps ({collapse.patience_steps}) is more than steps ({self.steps}), so that it finds nothing")
        return self

    @model_validator(mode="after")
    def _samples_can_be_compared(self) -> Self:
        if self.samples_per_prompt == 1:
            if self.algorithm.advantage.group_relative:
                raise ValueError(
                    f"algorithm.advantage.estimator={self.algorithm.advantage.estimator} compares the samples of a prompt, and samples_per_prompt=1; "
                    "raise that, or choose an estimator that does not, such as gae"
                )
            if not isinstance(self.groups, KeepGroups):
                raise ValueError(f"groups.kind={self.groups.kind} looks for groups with signal, and with samples_per_prompt=1 none has any; set keep")
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        if isinstance(self.groups, FilterGroups) and self.prompts_per_generation < self.prompts_per_step:
            raise ValueError(
                f"groups.prompts_per_generation ({self.prompts_per_generation}) is below prompts_per_step ({self.prompts_per_step}); raise it"
            )
        if self.rescue is not None and self.reward.shuffle:
            raise ValueError("rescue puts right answers in, and reward.shuffle is a control arm that must not learn; leave one of them out")
        return self

    @property
    def prompts_per_generation(self) -> int:
        """Prompts that are asked at a time."""
        own = self.groups.prompts_per_generation if isinstance(self.groups, FilterGroups) else None
        return own or self.prompts_per_step

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if isinstance(self.truncated, OverlongPenalty) and self.truncated.buffer_tokens > self.max_response_tokens:
            raise ValueError(
                f"truncated.buffer_tokens ({self.truncated.buffer_tokens}) is more than max_response_tokens ({self.max_response_tokens}), so that "
                "every response would be punished; lower it"
            )
        return self

    @model_validator(mode="after")
    def _one_temperature(self) -> Self:
        if self.temperature_from is not None and self.sampling.temperature != 1.0:
            raise ValueError(
                f"sampling.temperature ({self.sampling.temperature:g}) is set, and temperature_from={self.temperature_from} gives one; leave one out"
            )
        return self

    def at_temperature(self, temperature: float) -> Self:
        """The stage, sampling at what `temperature_from` has given."""
        sampling = self.sampling.model_copy(update={"temperature": temperature})
        return self.model_copy(update={"sampling": sampling, "temperature_from": None})

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

"""A recipe's configuration: data, model, stages and tracking, around the engine's settings."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from engine.config import (
    EvaluationConfig,
    ModelConfig,
    Positive,
    ResourcesConfig,
    RewardConfig,
    RLStageConfig,
    RolloutConfig,
    Settings,
    SFTStageConfig,
)

StageConfig = Annotated[SFTStageConfig | RLStageConfig, Field(discriminator="kind")]


class ChainSumConfig(Settings):
    """Chained sums and differences of single digits, from `reasoning-gym` (`chain_sum`)."""

    min_terms: Annotated[int, Field(ge=2)] = 2
    max_terms: Annotated[int, Field(ge=2)] = 8
    sft_rows: Positive = 20_000
    train_rows: Positive = 4_000
    validation_rows: Positive = 200
    test_rows: Positive = 280
    """Rows are spread evenly over the numbers of terms, as far as there are different sums."""
    worked_answers: bool = True
    """SFT answers write the partial sums between <think> and </think> before the boxed answer; false writes the box alone."""

    @model_validator(mode="after")
    def _terms_in_order(self) -> Self:
        if self.max_terms < self.min_terms:
            raise ValueError(f"max_terms ({self.max_terms}) is below min_terms ({self.min_terms})")
        return self


class DataConfig(Settings):
    """Generated problems, or files of one's own: exactly one of `chain_sum` and `train_file`."""

    chain_sum: ChainSumConfig | None = None
    train_file: str | None = None
    """Parquet or JSONL with prompt, data_source, ability, reward_model, extra_info. Relative paths start at the project's root."""
    validation_file: str | None = None
    test_file: str | None = None
    """Where null, `held_out_fraction` of the training prompts is taken out for it, chosen by content hash."""
    sft_file: str | None = None
    """Parquet or JSONL with messages; needed when a stage of kind sft uses files."""
    held_out_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.1
    prompt_suffix: str = ""
    """Appended to the last user message of every prompt."""


class TrackingConfig(Settings):
    """What goes to MLflow."""

    experiment: str | None = None
    """MLflow experiment; null takes MLFLOW_EXPERIMENT_NAME, or else the recipe's name."""
    samples_per_table: Positive = 32
    """Generations in one recorded table."""
    system_metrics: bool = False


class RecipeConfig(Settings):
    """A recipe: data, a model, and a list of stages by name, run in the order written."""

    name: str
    description: str
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    data: DataConfig
    model: ModelConfig
    stages: Annotated[dict[str, StageConfig], Field(min_length=1)]
    evaluation: EvaluationConfig = EvaluationConfig()
    evaluation_reward: RewardConfig = RewardConfig()
    resources: ResourcesConfig = ResourcesConfig()
    rollout: RolloutConfig = RolloutConfig()
    tracking: TrackingConfig = TrackingConfig()
    minimum_free_disk_gigabytes: Annotated[float, Field(ge=0)] = 1.0

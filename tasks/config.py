"""A recipe's configuration: data, model, stages and tracking, around the engine's settings."""

import hashlib
import math
from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, model_validator

from engine.config import (
    ROLES,
    AnnotatorConfig,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    Name,
    Positive,
    ResourcesConfig,
    RewardConfig,
    RLStageConfig,
    RolloutConfig,
    Settings,
    TrainingConfig,
)
from tasks.config_data import DataConfig
from tasks.problems import ConfigurationError, Problem
from tasks.stage_config import AskingStageConfig, StageConfig, evaluations_differ, filters_can_drop, kind_of, references_hold, searches_compare


class TrackingConfig(Settings):
    """What goes to MLflow."""

    experiment: str | None = None
    """MLflow experiment; null takes MLFLOW_EXPERIMENT_NAME, or else the recipe's name."""
    samples_per_table: Positive = 32
    """Generations in one recorded table."""
    system_metrics: bool = False
    """Record CPU, memory, disk and network use too."""


class RecipeConfig(Settings):
    """A recipe: data, a model, and a list of stages by name, run in the order written."""

    name: Name
    """Same as the file's; runs, data and the MLflow experiment are named after it."""
    description: str
    """One line for people."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Every random number of a run is a function of it and of the position: step, prompt, sample."""
    data: DataConfig
    model: ModelConfig
    stages: Annotated[dict[Name, StageConfig], Field(min_length=1)]
    """By name, in the order in which the recipe's file writes them."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Of the test set, before the first stage and after each."""
    evaluation_reward: RewardConfig = RewardConfig()
    """How an evaluation scores; whatever the stages are rewarded with."""
    resources: ResourcesConfig = ResourcesConfig()
    rollout: RolloutConfig = RolloutConfig()
    training: TrainingConfig = TrainingConfig()
    annotators: dict[Name, AnnotatorConfig] = {}
    """Roles that add columns to every rollout: reward models, and workers of one's own."""
    tracking: TrackingConfig = TrackingConfig()
    minimum_free_disk_gigabytes: Annotated[float, Field(ge=0)] = 1.0
    """Free space under the project's root without which a run does not start."""

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        if problems := list(_broken_rules(self)):
            raise ConfigurationError(problems)
        return self

    def digest(self) -> str:
        """SHA-256 over the resolved settings and the order of the stages."""
        return hashlib.sha256(f"{super().digest()} {' '.join(self.stages)}".encode()).hexdigest()

    def engine(self) -> EngineConfig:
        """What the engine's workers are given for this recipe."""
        return EngineConfig(
            seed=self.seed,
            dtype=self.model.dtype,
            max_context_tokens=self.max_context_tokens(),
            resources=self.resources,
            rollout=self.rollout,
            training=self.training,
            reference=any(stage.algorithm.kl is not None for stage in self.rl_stages()),
            critic=any(stage.algorithm.critic is not None for stage in self.rl_stages()),
            annotators=self.annotators,
        )

    def rl_stages(self) -> list[RLStageConfig]:
        """Stages of kind rl, in order."""
        return [stage for stage in self.stages.values() if stage.kind == "rl"]

    def generating_stages(self) -> dict[str, RLStageConfig | AskingStageConfig]:
        """Stages in which the policy is asked and scored, by name, in order."""
        return {name: stage for name, stage in self.stages.items() if isinstance(stage, RLStageConfig | AskingStageConfig)}

    def max_context_tokens(self) -> int:
        """Longest prompt plus response, in tokens, that any stage or evaluation generates."""
        stages = [stage.max_prompt_tokens + stage.max_response_tokens for stage in self.generating_stages().values()]
        return max([*stages, self.max_evaluation_prompt_tokens() + self.evaluation.max_response_tokens])

    def max_evaluation_prompt_tokens(self) -> int:
        """Longest prompt that an evaluation keeps: the largest cap of the stages that generate, else of the conversations of the SFT stages."""
        caps = [stage.max_prompt_tokens for stage in self.generating_stages().values()]
        return max(caps or [stage.max_tokens for stage in self.stages.values() if stage.kind == "sft"])


def _broken_rules(recipe: RecipeConfig) -> Iterator[Problem]:
    """Rules between settings of different parts, which no part can check alone."""
    yield from references_hold(recipe.stages)
    yield from evaluations_differ(recipe.stages)
    yield from filters_can_drop(recipe.stages)
    yield from searches_compare(recipe.stages)
    yield from _ranks_divide(recipe)
    yield from _batches_divide(recipe)
    yield from _tokens_fit(recipe)
    yield from _rejection_acts(recipe)
    yield from _greedy_answers_are_scored_alike(recipe)
    yield from _reference_can_be_reset(recipe)
    if recipe.data.train_file is not None and recipe.data.sft_file is None:
        for name, stage in recipe.stages.items():
            if kind_of(stage).reads == "sft":
                text = f"stage {name} ({stage.kind}) needs a file of conversations; set it, or take the stage out: ~stages.{name}"
                yield Problem("data.sft_file", text)
    if recipe.rollout.changed_only and recipe.training.lora is not None:
        text = "with training.lora nothing but the adapter is sent, and all of it has changed; set false"
        yield Problem("rollout.changed_only", text, ("training.lora",))
    asking = {f"stages.{name}.reward": stage.reward for name, stage in recipe.stages.items() if isinstance(stage, AskingStageConfig)}
    for key, reward in {"evaluation_reward": recipe.evaluation_reward, **asking}.items():
        if reward.shuffle:
            yield Problem(f"{key}.shuffle", "shuffled scores measure nothing; set false")
        if reward.on_failure == "exclude":
            yield Problem(f"{key}.on_failure", "an accuracy is over all samples, those without a score included; set zero")


def _ranks_divide(recipe: RecipeConfig) -> Iterator[Problem]:
    known = [*ROLES, *recipe.annotators]
    rewards = {f"stages.{name}.reward": stage.reward for name, stage in recipe.generating_stages().items()}
    for role in recipe.resources.roles:
        if role not in known:
            yield Problem(f"resources.roles.{role}", f"there is no such role; there are: {', '.join(known)}")
    for name in recipe.annotators:
        for key, reward in rewards.items():
            if any(name == part for _, part, _ in reward.all_parts()):
                yield Problem(f"annotators.{name}", f"{key} has a part of that name, and both would be the metric reward/{name}_mean; rename one")
        if name in ROLES:
            yield Problem(f"annotators.{name}", f"the engine has a role of that name; choose another than {', '.join(ROLES)}")
    ranks = {role: recipe.resources.ranks_of(role) for role in ("actor", "reference", "critic")}
    for key, size, concerned in (
        ("rollout.tensor_parallel_ranks", recipe.rollout.tensor_parallel_ranks, ["actor"]),
        ("training.tensor_parallel_ranks", recipe.training.tensor_parallel_ranks, list(ranks)),
        ("training.shard_ranks", recipe.training.shard_ranks, list(ranks)),
    ):
        for role in concerned:
            if size is not None and ranks[role] % size:
                text = f"{ranks[role]} ranks of role {role} cannot be divided into groups of {size}; choose a divisor of {ranks[role]}"
                yield Problem(key, text, ("resources.ranks", "resources.pools", "resources.roles"))
                break


def _batches_divide(recipe: RecipeConfig) -> Iterator[Problem]:
    ranks = recipe.training.data_parts(recipe.resources.ranks_of("actor"))
    for name, stage in recipe.stages.items():
        if stage.kind == "sft":
            key, size, updates, what = f"stages.{name}.rows_per_step", stage.rows_per_step, 1, "rows"
        elif stage.kind == "rl":
            key, size, updates, what = f"stages.{name}.prompts_per_step", stage.prompts_per_step, stage.updates_per_step, "prompts"
        else:
            continue
        unit = ranks * updates
        if size % unit:
            below, above = size // unit * unit, (size // unit + 1) * unit
            nearest = f"{below} or {above}" if below else f"{above}"
            batch = f"{size} {what}" if updates == 1 else f"{size} {what} in stages.{name}.updates_per_step={updates} mini-batches"
            text = f"{batch} cannot be divided among {_what_divides(recipe, ranks)}; use {nearest}, or change the ranks"
            yield Problem(key, text, ("resources", "training", f"stages.{name}.updates_per_step"))


def _what_divides(recipe: RecipeConfig, parts: int) -> str:
    if recipe.training.data_parts(parts) != parts:
        return f"{parts} data-parallel parts of training.backend={recipe.training.backend}"
    pool = recipe.resources.pool_of("actor")
    return f"resources.{'' if pool == 'main' else f'pools.{pool}.'}ranks={parts}"


def _rejection_acts(recipe: RecipeConfig) -> Iterator[Problem]:
    bound_key, bound = "rollout.max_log_prob_difference", recipe.rollout.max_log_prob_difference
    for name, stage in recipe.stages.items():
        correction = stage.algorithm.off_policy if stage.kind == "rl" else None
        if bound is None or correction is None or (rejection := correction.rejection) is None or rejection.level == "sequence":
            continue
        # Ratios of tokens, and their geometric means, stay within exp(-bound) .. exp(bound).
        if math.exp(-bound) >= rejection.low and math.exp(bound) <= rejection.high:
            text = (
                f"{bound_key}={bound:g} stops the run before any ratio leaves {rejection.low:g} .. {rejection.high:g}; raise that, or set it to null"
            )
            yield Problem(f"stages.{name}.algorithm.off_policy.rejection", text, (bound_key,))


def _greedy_answers_are_scored_alike(recipe: RecipeConfig) -> Iterator[Problem]:
    for name, stage in recipe.stages.items():
        for annotator, settings in recipe.annotators.items():
            if stage.kind == "rl" and stage.algorithm.advantage.needs_greedy and settings.reward_weight:
                estimator = f"stages.{name}.algorithm.advantage.estimator"
                text = f"{estimator}={stage.algorithm.advantage.estimator} compares samples with greedy answers, which annotators do not see; set 0"
                yield Problem(f"annotators.{annotator}.reward_weight", text, (estimator,))


def _reference_can_be_reset(recipe: RecipeConfig) -> Iterator[Problem]:
    for name, stage in recipe.stages.items():
        if stage.kind == "rl" and stage.algorithm.kl and stage.algorithm.kl.reset_reference_every_steps and recipe.training.lora:
            text = "with training.lora the reference is the base with the adapter off, which never changes; leave one of both out"
            yield Problem(f"stages.{name}.algorithm.kl.reset_reference_every_steps", text, ("training.lora",))


def _tokens_fit(recipe: RecipeConfig) -> Iterator[Problem]:
    if recipe.model.architecture is not None:
        yield from context_problems(recipe, recipe.model.architecture.max_context_tokens, "model.architecture.max_context_tokens")


def context_problems(recipe: RecipeConfig, context: int, key: str) -> Iterator[Problem]:
    """Caps above the model's own context of so many tokens, which the setting `key` is behind; those that a length extension reaches are none."""
    remedy = f"do not fit into the model's context, {context} ({key}); lower them, or take another model"
    extended = f"{remedy}, or set length_extension"
    for name, stage in recipe.stages.items():
        if stage.kind == "sft" and stage.max_tokens > context:
            yield Problem(f"stages.{name}.max_tokens", f"{stage.max_tokens} tokens {remedy}", (key,))
    prompt_keys = []
    for name, generating in recipe.generating_stages().items():
        prompt_key, above = f"stages.{name}.max_prompt_tokens", f"stages.{name}.length_extension"
        prompt_keys.append(prompt_key)
        if generating.max_prompt_tokens + generating.max_response_tokens > context and generating.length_extension is None:
            text = f"{prompt_key}={generating.max_prompt_tokens} plus {generating.max_response_tokens} tokens {extended}"
            yield Problem(f"stages.{name}.max_response_tokens", text, (key, prompt_key, above))
    prompt, response = recipe.max_evaluation_prompt_tokens(), recipe.evaluation.max_response_tokens
    if prompt + response > context and recipe.evaluation.length_extension is None:
        text = f"prompts of up to {prompt} tokens plus {response} tokens {extended}"
        yield Problem("evaluation.max_response_tokens", text, (key, "evaluation.length_extension", *prompt_keys))

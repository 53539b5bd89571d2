"""The stages that a recipe can have: their settings, what each kind needs and leaves for others, and how stages refer to each other."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.config import Name, Positive, RewardConfig, RLStageConfig, SamplingConfig, Settings, SFTStageConfig
from tasks.problems import Problem

Rate = Annotated[float, Field(ge=0, le=1)]


class AskingStageConfig(Settings):
    """A stage that asks the policy and does not change it."""

    samples_per_prompt: Positive = 8
    max_prompt_tokens: Positive
    """Longer prompts are not asked, and are left out of what the stage gives to others."""
    max_response_tokens: Positive
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    prompts: Name | None = None
    """Stage before this one whose prompts are asked; null asks those of the train split."""
    prompts_per_batch: Positive = 64
    """Prompts whose samples are drawn, scored and stored at a time: what a killed run loses at most. Samples do not depend on it."""


class KeepRatesConfig(Settings):
    """Pass rates of the prompts that are kept, ends included."""

    min_rate: Rate = 0.0
    max_rate: Rate = 0.875
    """With 8 samples, the default leaves out the prompts that are answered right every time."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max_rate < self.min_rate:
            raise ValueError(f"max_rate ({self.max_rate:g}) is below min_rate ({self.min_rate:g}), so that no prompt would be kept")
        return self


class DifficultyStageConfig(AskingStageConfig):
    """How often the policy, as it is then, answers each prompt right; prompts that it answers too often, or too seldom, are left out."""

    kind: Literal["difficulty"]
    right_above: float = 0.0
    """A response is right when its outcome, as the reward functions gave it, is above this."""
    keep: KeepRatesConfig = KeepRatesConfig()

    @model_validator(mode="after")
    def _some_rate_is_kept(self) -> Self:
        n = self.samples_per_prompt
        if not any(self.keep.min_rate <= k / n <= self.keep.max_rate for k in range(n + 1)):
            raise ValueError(
                f"keep: no pass rate of samples_per_prompt={n} lies between min_rate={self.keep.min_rate:g} and max_rate={self.keep.max_rate:g}, "
                "so that no prompt would be kept; widen the range, or draw more samples"
            )
        return self


class DropEasyStageConfig(Settings):
    """Leaves out the prompts that training got too easy: by the outcomes that RL stages logged, as the reward functions gave them."""

    kind: Literal["drop_easy"]
    scores_of: Annotated[list[Name], Field(min_length=1)]
    """RL stages before this one whose logged outcomes are looked at."""
    prompts: Name | None = None
    """Stage before this one whose prompts are filtered; null filters those of the train split."""
    threshold: float = 0.9
    """A prompt is dropped when its estimate is above this."""
    estimator: Literal["mean", "latest"] = "mean"
    """The estimate: mean of a prompt's mean outcomes over all visits of these stages, or the mean outcome of the last visit alone."""
    min_visits: Positive = 1
    """Prompts that were visited less often are kept, and so are those that never were."""

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if twice := sorted({name for name in self.scores_of if self.scores_of.count(name) > 1}):
            raise ValueError(f"scores_of names {', '.join(twice)} more than once")
        return self


StageConfig = Annotated[SFTStageConfig | RLStageConfig | DifficultyStageConfig | DropEasyStageConfig, Field(discriminator="kind")]

Given = Literal["prompts", "scores"]


@dataclass(frozen=True, slots=True)
class Kind:
    """What a stage of one kind does, as far as others have to know."""

    trains: bool = False
    """It leaves weights, which are evaluated after it."""
    reads: Literal["sft", "train"] = "train"
    """The split that it reads when it refers to no other stage's prompts."""
    gives: Given | None = None
    """What later stages can take from it."""
    engine: bool = True
    """It needs the engine, with the weights as they are then."""
    resumes: bool = False
    """It goes on from what a killed run left in its output directory; others begin anew."""
    code: tuple[str, ...] = ()
    """Source files, beside the engine's, that its output depends on."""


KINDS: Mapping[str, Kind] = {
    "sft": Kind(trains=True, reads="sft"),
    "rl": Kind(trains=True, gives="scores"),
    "difficulty": Kind(gives="prompts", resumes=True, code=("tasks/difficulty.py", "tasks/prompt_files.py")),
    "drop_easy": Kind(gives="prompts", engine=False, code=("tasks/drop_easy.py", "tasks/prompt_files.py")),
}
REFERENCES: Mapping[str, Given] = {"prompts": "prompts", "scores_of": "scores"}
"""Settings that name other stages, and what is taken from these."""


def kind_of(stage: StageConfig) -> Kind:
    """What a stage does, by its kind."""
    return KINDS[stage.kind]


def references(stage: StageConfig) -> Iterator[tuple[str, str]]:
    """(setting, name of another stage) for each stage that this one takes something from."""
    for setting in REFERENCES:
        value = getattr(stage, setting, None)
        for name in [value] if isinstance(value, str) else value or []:
            yield setting, name


def planned_steps(stage: StageConfig) -> int | None:
    """Steps of a stage that trains; None for the others, and before a stage of so many epochs has begun."""
    return stage.steps if isinstance(stage, SFTStageConfig | RLStageConfig) else None


def references_hold(stages: Mapping[str, StageConfig]) -> Iterator[Problem]:
    """A stage can take something only from stages before it, and only what these give."""
    order = list(stages)
    for position, (name, stage) in enumerate(stages.items()):
        for setting, other in references(stage):
            wanted = REFERENCES[setting]
            givers = [earlier for earlier in order[:position] if kind_of(stages[earlier]).gives == wanted]
            if other in givers:
                continue
            if other not in stages:
                wrong = f"there is no stage {other}"
            elif order.index(other) >= position:
                wrong = f"stage {other} does not come before {name}"
            else:
                wrong = f"stage {other}, of kind {stages[other].kind}, has no {wanted}"
            there_are = f"stages before it with {wanted}: {', '.join(givers)}" if givers else f"no stage before it has {wanted}"
            others = tuple(f"stages.{earlier}" for earlier in order)
            yield Problem(f"stages.{name}.{setting}", f"{wrong}; {there_are}", others)


def filters_can_drop(stages: Mapping[str, StageConfig]) -> Iterator[Problem]:
    """A step visits a prompt once, so that it is visited no more often than the stages have steps."""
    for name, stage in stages.items():
        if isinstance(stage, DropEasyStageConfig):
            visits = sum(planned_steps(stages[other]) or 0 for other in stage.scores_of if other in stages)
            if stage.min_visits > visits:
                steps = tuple(f"stages.{other}.steps" for other in stage.scores_of)
                text = f"{stage.min_visits} visits are more than the {visits} steps of {', '.join(stage.scores_of)}, so that nothing would be dropped"
                yield Problem(f"stages.{name}.min_visits", f"{text}; lower it", (*steps, f"stages.{name}.scores_of"))

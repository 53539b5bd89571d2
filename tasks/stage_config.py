"""The stages that a recipe can have: their settings, what each kind needs and leaves for others, and how stages refer to each other."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.config import LengthExtensionConfig, Name, Positive, RewardConfig, RLStageConfig, SamplingConfig, Settings, SFTStageConfig
from tasks.problems import Problem

Rate = Annotated[float, Field(ge=0, le=1)]


class AskingStageConfig(Settings):
    """A stage that asks the policy and does not change it."""

    samples_per_prompt: Positive = 8
    max_prompt_tokens: Positive
    """Longer prompts are not asked, and are left out of what the stage gives to others."""
    max_response_tokens: Positive
    length_extension: LengthExtensionConfig | None = None
    """Of what this stage generates; null leaves the model's positions as they are."""
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


class GridConfig(Settings):
    """Temperatures at equal distances, ends included."""

    low: Annotated[float, Field(ge=0.01)]
    high: Annotated[float, Field(ge=0.01)]
    """The same as `low` asks at this one alone: its diversity is then what a later search matches."""
    step: Annotated[float, Field(gt=0)] = 0.05

    @model_validator(mode="after")
    def _steps_reach_the_end(self) -> Self:
        steps = (self.high - self.low) / self.step
        if self.high < self.low or abs(steps - round(steps)) > 1e-6:
            raise ValueError(f"high ({self.high:g}) is not low ({self.low:g}) plus some steps of {self.step:g}; change one of them")
        return self

    def values(self) -> list[float]:
        """The temperatures, rising."""
        return [round(self.low + number * self.step, 6) for number in range(round((self.high - self.low) / self.step) + 1)]


class DiversityConfig(Settings):
    """Distinct 4-grams over all 4-grams of the responses to a question, mean over questions."""

    unit: Literal["tokens", "words"] = "tokens"
    """What n-grams are made of: the model's tokens, or words between white space, as POLARIS counts them. A model of characters may answer without
    white space."""
    equal_length: bool = True
    """Compare prefixes of one length, because the share falls as texts get longer. false takes whole responses, as POLARIS does."""
    prefix_length: Annotated[int, Field(ge=4)] | None = None
    """Units of each response that count; shorter responses are left out. null takes it from the search that is matched, else the length that nine in
    ten responses at the grid's lowest temperature reach."""

    @model_validator(mode="after")
    def _length_is_for_prefixes(self) -> Self:
        if self.prefix_length is not None and not self.equal_length:
            raise ValueError(f"prefix_length ({self.prefix_length}) is for equal_length=true; leave it out, or set that")
        return self


class TemperatureSearchStageConfig(AskingStageConfig):
    """At which temperature the next RL stage is to sample: the policy, as it is then, is asked at every temperature of a grid."""

    kind: Literal["temperature_search"]
    samples_per_prompt: Positive = 16
    max_prompts: Positive | None = None
    """Ask the first so many prompts; null asks all."""
    grid: GridConfig
    right_above: float = 0.0
    """A response is right when its outcome, as the reward functions gave it, is above this."""
    diversity: DiversityConfig = DiversityConfig()
    rule: Literal["match_diversity", "controlled_exploration"] = "controlled_exploration"
    """`match_diversity`: the temperature whose diversity is nearest to the one that the search `matches` had at the temperature it picked.
    `controlled_exploration`: the highest before the accuracy begins to fall: from the best one on upwards, as long as no accuracy is more than
    `max_accuracy_loss` below the best."""
    matches: Name | None = None
    """Search before this one, of the policy that the RL stage before began with; of rule match_diversity."""
    max_accuracy_loss: Rate = 0.02
    """Of rule controlled_exploration; a fraction of 1."""
    max_tokens_per_micro_batch: Positive = 8192
    """Tokens of one pass that computes entropies on one rank."""

    @model_validator(mode="after")
    def _temperature_is_searched(self) -> Self:
        if self.sampling.temperature != 1.0:
            raise ValueError(f"sampling.temperature ({self.sampling.temperature:g}) is what the search goes through; leave it out, and set grid")
        if (self.rule == "match_diversity") != (self.matches is not None):
            raise ValueError(f"rule={self.rule}, and matches is {self.matches or 'null'}; rule=match_diversity needs the name of a search before it")
        return self


StageConfig = Annotated[
    SFTStageConfig | RLStageConfig | DifficultyStageConfig | DropEasyStageConfig | TemperatureSearchStageConfig, Field(discriminator="kind")
]

BASE = "base"
"""Label of the evaluation of the weights that a recipe starts from; every other evaluation has the name of the stage before it."""
Given = Literal["prompts", "scores", "temperature"]


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
    "temperature_search": Kind(gives="temperature", code=("tasks/temperature_search.py", "tasks/diversity.py", "tasks/prompt_files.py")),
}
REFERENCES: Mapping[str, Given] = {"prompts": "prompts", "scores_of": "scores", "temperature_from": "temperature", "matches": "temperature"}
"""Settings that name other stages, and what is taken from these."""
GIVEN: Mapping[Given, str] = {"prompts": "prompts.parquet", "scores": "scores.jsonl", "temperature": "temperature.json"}
"""The file of an output that it is taken from."""


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


def evaluations_differ(stages: Mapping[str, StageConfig]) -> Iterator[Problem]:
    """Evaluations go by the name of the stage before them."""
    if BASE in stages and kind_of(stages[BASE]).trains:
        yield Problem(f"stages.{BASE}", f"evaluations of the weights that a recipe starts from are called {BASE}; give the stage another name")


def filters_can_drop(stages: Mapping[str, StageConfig]) -> Iterator[Problem]:
    """A step visits a prompt once, so that it is visited no more often than the stages have steps."""
    for name, stage in stages.items():
        if isinstance(stage, DropEasyStageConfig):
            visits = sum(planned_steps(stages[other]) or 0 for other in stage.scores_of if other in stages)
            if stage.min_visits > visits:
                steps = tuple(f"stages.{other}.steps" for other in stage.scores_of)
                text = f"{stage.min_visits} visits are more than the {visits} steps of {', '.join(stage.scores_of)}, so that nothing would be dropped"
                yield Problem(f"stages.{name}.min_visits", f"{text}; lower it", (*steps, f"stages.{name}.scores_of"))


def searches_compare(stages: Mapping[str, StageConfig]) -> Iterator[Problem]:
    """A diversity can be matched only with one that was measured in the same way, on the same questions."""
    for name, stage in stages.items():
        if not isinstance(stage, TemperatureSearchStageConfig):
            continue
        other = stages.get(stage.matches or "")
        if not isinstance(other, TemperatureSearchStageConfig):
            continue
        for setting in ("samples_per_prompt", "max_prompts", "max_prompt_tokens", "prompts"):
            yield from _equal(f"stages.{name}", f"stages.{stage.matches}", stage, other, setting)
        own, theirs = stage.diversity, other.diversity
        for setting in ("unit", "equal_length", *(["prefix_length"] if own.prefix_length is not None else [])):
            yield from _equal(f"stages.{name}.diversity", f"stages.{stage.matches}.diversity", own, theirs, setting)


def _equal(key: str, other_key: str, own: Settings, theirs: Settings, setting: str) -> Iterator[Problem]:
    mine, wanted = getattr(own, setting), getattr(theirs, setting)
    if mine != wanted:
        text = f"{mine or 'null'} is not what {other_key}.{setting} is ({wanted or 'null'}), so that diversities do not compare; set both to the same"
        yield Problem(f"{key}.{setting}", text, (f"{other_key}.{setting}",))

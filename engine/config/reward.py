"""How responses are scored, by functions and by models."""

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, Tag, model_validator

from engine.config.base import OWN, Name, Positive, Settings, chosen_by, known, name_known

if TYPE_CHECKING:
    from engine.registry import Registry


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


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
"""A regular expression, as Python's `re` reads it."""


class CanaryConfig(Settings):
    """A response whose score is known. It is scored with every step; another score stops the run."""

    response: str
    ground_truth: str = ""
    response_tokens: Annotated[int, Field(ge=0)] = 0
    finished: bool = True
    score: float


class PartSettings(Settings):
    """One part of a reward."""

    function: str
    weight: float = 1.0
    """The function's score times this is added to the reward."""
    shapes: bool = False
    """It shapes the reward, and does not say whether a response is right: groups have signal, and responses are remembered, by the other parts."""
    canaries: list[CanaryConfig] = []
    """Known answers, beside those that the functions bring along."""

    def given(self) -> dict[str, Any]:
        """What the function is given beside the sample."""
        own = self.model_dump()
        return {name: value for name, value in own.items() if name not in PartSettings.model_fields}


class ShapingSettings(PartSettings):
    """A part that looks at a response's form or length."""

    shapes: bool = True
    """It shapes the reward, and does not say whether a response is right."""


class MathVerifyConfig(PartSettings):
    """1 where the boxed or last expression equals the ground truth as mathematics, else 0."""

    function: Literal["math_verify"]
    require_think: bool = False
    """A response that never says `</think>` scores 0."""
    require_box: bool = False
    """The answer is what stands in the last box alone, and a response without a box scores 0; false takes its last expression."""


class ExactMatchConfig(PartSettings):
    """1 where the box holds the ground truth letter for letter, else 0."""

    function: Literal["exact_match"]
    require_think: bool = False
    """A response that never says `</think>` scores 0."""


class MultipleChoiceConfig(PartSettings):
    """1 where the chosen letter is the ground truth's, else 0."""

    function: Literal["multiple_choice"]


class FormatConfig(ShapingSettings):
    """1 where the whole response has a form, else 0."""

    function: Literal["format"]
    pattern: Pattern | None = None
    """Regular expression for the whole response, in which `.` is any character; null asks for one block `<think>..</think>` and then an answer."""


class RegexConfig(PartSettings):
    """1 where the text after the thinking contains a regular expression, or this finds the ground truth in it; else 0."""

    function: Literal["regex"]
    pattern: Pattern
    equals_ground_truth: bool = False
    """The first group of the last match, or all of it, has to be the ground truth."""


class RuleConfig(Settings):
    """A regular expression that the text after the thinking must, or must not, contain."""

    name: Name
    """Of the metric `reward/NAME_mean`: how often the rule is kept."""
    pattern: Pattern
    must: bool = True
    """false: the text must not contain it."""
    weight: Annotated[float, Field(gt=0)] = 1.0


class RulesConfig(PartSettings):
    """The share, by weight, of the rules that the text after the thinking keeps."""

    function: Literal["rules"]
    rules: Annotated[list[RuleConfig], Field(min_length=1)]
    ignore_case: bool = True

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [rule.name for rule in self.rules]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rules: several are called {', '.join(twice)}; give each a name of its own")
        return self


class LengthConfig(ShapingSettings):
    """1 at a length of the response, falling linearly to 0 at twice that and at nothing; or 1 within bounds, else 0."""

    function: Literal["length"]
    target_tokens: Positive | None = None
    """Instead of bounds."""
    min_tokens: Positive | None = None
    max_tokens: Positive | None = None

    @model_validator(mode="after")
    def _target_or_bounds(self) -> Self:
        if (self.target_tokens is not None) == (self.min_tokens is not None or self.max_tokens is not None):
            raise ValueError("set target_tokens, or min_tokens and max_tokens or one of them")
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        return self


class OverlongConfig(ShapingSettings):
    """0, falling linearly to -1 over the last tokens before a cap: the soft overlong punishment of DAPO (arXiv:2503.14476, equation 13)."""

    function: Literal["overlong"]
    max_tokens: Positive
    """Here and beyond it is -1; usually the stage's max_response_tokens."""
    buffer_tokens: Positive
    """Length of the slope that ends there."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens ({self.buffer_tokens}) is above max_tokens ({self.max_tokens}), so that every response is punished")
        return self


class OwnRewardConfig(PartSettings):
    """A function of one's own (docs/rewards.md)."""

    function: str
    """`module:function`"""
    parameters: dict[str, Any] = {}
    """Of the function by name, beside those that it is told of a sample."""
    samples_at_once: Positive = 1
    """Calls of an async function that a process runs side by side; or the largest number of samples that a function with the parameter `samples` is
    given."""

    def given(self) -> dict[str, Any]:
        """What the function is given beside the sample."""
        return self.parameters


def _registry() -> "Registry[Callable[..., Any]]":
    from engine.rewards.registry import REWARDS

    return REWARDS


def _function_named(value: Any) -> Any:
    if isinstance(value, dict) and not isinstance(value.get("function"), str):
        raise ValueError("function: has to be set: a name from `almanac list`, or module:function of your own")
    return value


RewardPart = Annotated[
    Annotated[MathVerifyConfig, Tag("math_verify")]
    | Annotated[ExactMatchConfig, Tag("exact_match")]
    | Annotated[MultipleChoiceConfig, Tag("multiple_choice")]
    | Annotated[FormatConfig, Tag("format")]
    | Annotated[RegexConfig, Tag("regex")]
    | Annotated[RulesConfig, Tag("rules")]
    | Annotated[LengthConfig, Tag("length")]
    | Annotated[OverlongConfig, Tag("overlong")]
    | Annotated[OwnRewardConfig, Tag(OWN)],
    chosen_by("function", default=""),
    name_known(_registry, "function"),
    BeforeValidator(_function_named),
]
"""A function with its parameters; those of another are refused."""


def part_name(function: str) -> str:
    """What a part is called that is written as a function's name alone: `polite` of `my_rewards:polite`."""
    return function.rpartition(":")[2].lower()


def _named(value: Any) -> Any:
    """The short form, a function's name, as the mapping that it stands for."""
    if not isinstance(value, str):
        return value
    _registry().locate(value)
    return {part_name(value): {"function": value}}


Parts = Annotated[dict[Name, RewardPart], Field(min_length=1), BeforeValidator(_named)]
"""A sum: parts by names of one's own. A function's name alone stands for a sum of one."""


class RewardRunnerConfig(Settings):
    """The processes that rewards run in; each rank of the reward role has its own."""

    processes: Positive = 2
    """So many samples are scored at the same time."""
    max_processes: Positive = 16
    """A call that takes longer than a quarter of a second makes room for another one, until there are so many processes: samples that hang then
    wait side by side for their time limit, and hold up nobody. As many as `processes` never makes room."""
    time_limit_seconds: Annotated[float, Field(gt=0)] = 10.0
    """For one sample, from the moment at which its reward is called. The process is killed then, and the sample's status is `timeout`."""
    memory_limit_megabytes: Annotated[float, Field(gt=0)] = 1_000.0
    """Address space that a process may take beyond what it has when its functions are loaded. Asking for more raises MemoryError in the function."""

    @model_validator(mode="after")
    def _most_is_most(self) -> Self:
        if self.max_processes < self.processes:
            raise ValueError(f"max_processes ({self.max_processes}) is below processes ({self.processes}); raise it")
        return self


class RewardConfig(Settings):
    """How a response is scored (docs/rewards.md)."""

    by_data_source: dict[str, Parts] = {}
    """Reward for each value of the `data_source` column. A function's name from `almanac list`, or `module:function` of one's own; or a sum: parts by
    names of one's own, each with its function, weight and parameters."""
    default: Parts = {"math_verify": MathVerifyConfig(function="math_verify")}
    """Reward of every other data source."""
    on_failure: Literal["zero", "exclude"] = "zero"
    """What a sample earns whose reward times out or fails: `zero`, or nothing: `exclude` takes it out of the statistics of its group and out of the
    loss. Either way it is counted, and shown with its status."""
    max_failure_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The run stops when more than this share of a step's samples have no score; 1 goes on whatever happens."""
    runner: RewardRunnerConfig = RewardRunnerConfig()
    shuffle: bool = False
    """Control arm: deal the scores of a step out at random among its samples. A run that still learns is leaking."""

    def of(self, data_source: str) -> Parts:
        """The parts of a data source's reward."""
        return self.by_data_source.get(data_source, self.default)

    def all_parts(self) -> Iterator[tuple[str, str, RewardPart]]:
        """(`default` or `by_data_source.SOURCE`, name, part) of every part."""
        sums = {"default": self.default, **{f"by_data_source.{source}": parts for source, parts in self.by_data_source.items()}}
        for place, parts in sums.items():
            for name, part in parts.items():
                yield place, name, part

"""Groups without signal: all valid samples of a prompt have the same outcome, and a group-relative estimator learns nothing from them."""

from typing import Annotated, Literal

from pydantic import Field, Tag

from engine.config.base import Positive, Settings, chosen_by


class KeepGroups(Settings):
    """They stay, with advantage 0, and count in every mean."""

    kind: Literal["keep"] = "keep"


class FilterGroups(Settings):
    """They are taken out and more prompts asked, until the step has `prompts_per_step` groups with signal (DAPO, arXiv:2503.14476, section 3.2)."""

    kind: Literal["filter"]
    prompts_per_generation: Positive | None = None
    """Prompts of each generation; null takes `prompts_per_step`. Groups with signal beyond `prompts_per_step` are not used."""
    max_generations: Positive = 10
    """Generations of one step at most."""
    when_spent: Literal["train", "stop"] = "train"
    """With too few groups after the last generation: train on those that there are, or stop the run."""


class SubstituteGroups(Settings):
    """Their rows are replaced by those of groups with signal, drawn by a seeded generator, without replacement where there are enough (POLARIS)."""

    kind: Literal["substitute"]
    least_fraction: Annotated[float, Field(ge=0, lt=1)] = 1 / 3
    """A step of which no more than this share of the groups has signal makes no update."""


class DropGroups(Settings):
    """They leave the step: its updates and their denominators count the other groups."""

    kind: Literal["drop"]


GroupsConfig = Annotated[
    Annotated[KeepGroups, Tag("keep")]
    | Annotated[FilterGroups, Tag("filter")]
    | Annotated[SubstituteGroups, Tag("substitute")]
    | Annotated[DropGroups, Tag("drop")],
    chosen_by("kind", default="keep"),
]


class RescueConfig(Settings):
    """A memory of right responses by prompt. Where all samples of a group are wrong, one of them is replaced by one from there (POLARIS)."""

    responses_per_prompt: Positive = 1
    """The last so many right responses to a prompt are kept."""
    max_prompts: Positive = 10_000
    """Of more prompts, those whose responses are oldest are forgotten."""
    right_above: float = 0.0
    """A response is right when its outcome, as the reward functions gave it, is above this."""

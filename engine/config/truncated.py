"""Answers that reached `max_response_tokens` before their end."""

from typing import Annotated, Literal

from pydantic import Field, Tag

from engine.config.base import Positive, Settings, chosen_by


class KeepTruncated(Settings):
    """They earn what their reward says, which is a failure wherever the answer comes last."""

    kind: Literal["keep"] = "keep"


class MaskBeforeStatistics(Settings):
    """They leave their group before its mean and deviation are taken, and have no loss: the policy learns nothing about length."""

    kind: Literal["mask_before"]


class MaskAfterStatistics(Settings):
    """They count in the mean and deviation of their group, and have no loss (overlong filtering; DAPO, arXiv:2503.14476, section 3.4)."""

    kind: Literal["mask_after"]


class OverlongPenalty(Settings):
    """The last tokens before the cap cost reward, linearly, truncated or not (soft overlong punishment; DAPO, arXiv:2503.14476, equation 13)."""

    kind: Literal["penalty"]
    buffer_tokens: Positive
    """So many tokens before `max_response_tokens` the penalty begins."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Subtracted from the reward of an answer that is as long as it can be."""


TruncatedConfig = Annotated[
    Annotated[KeepTruncated, Tag("keep")]
    | Annotated[MaskBeforeStatistics, Tag("mask_before")]
    | Annotated[MaskAfterStatistics, Tag("mask_after")]
    | Annotated[OverlongPenalty, Tag("penalty")],
    chosen_by("kind", default="keep"),
]

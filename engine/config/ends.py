"""When an RL stage ends before its last step."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from engine.config.base import Fraction, Positive, Settings


class ConvergenceConfig(Settings):
    """The stage is done when neither its mean reward nor its mean response length still grows, as far as the last steps can tell.

    Of each, a straight line is fitted through the last `window_steps` steps by least squares. It has stopped to grow where the upper end of the
    slope's one-sided confidence interval is at most the bound times its mean in the window. Noise widens the interval: what cannot be told goes on.
    """

    window_steps: Annotated[int, Field(ge=20)] = 60
    """Steps that the lines are fitted through. The interval narrows with its power of 3/2."""
    min_steps: Positive = 100
    """The stage has at least so many steps."""
    max_reward_growth: Annotated[float, Field(gt=0)] = 1e-3
    """Growth of the mean reward in one step that still counts as none, as a share of its mean (of absolute values) in the window."""
    max_length_growth: Annotated[float, Field(gt=0)] = 1e-3
    """The same for the mean response length."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """Of the intervals. A reward that grows by the bound or more is taken for flat at a given step with at most 1 minus this probability."""


class CollapseConfig(Settings):
    """The run is stopped when the policy has collapsed: when one of these bounds is passed for `patience_steps` steps in a row.

    null leaves a bound out.
    """

    patience_steps: Positive = 10
    baseline_steps: Positive = 10
    """First steps of the stage, whose mean is what the shares below are of. These bounds are looked at after them."""
    min_entropy_nats: Annotated[float, Field(gt=0)] | None = None
    """Least entropy of the policy, mean of a step's response tokens, at temperature 1 whatever the stage samples at."""
    min_entropy_share: Fraction | None = 0.1
    """The same, as a share of that of the stage's first steps."""
    min_length_share: Fraction | None = 0.2
    """Least mean response length, as a share of that of the stage's first steps."""
    max_truncated_share: Annotated[float, Field(ge=0, lt=1)] | None = 0.5
    """Largest share of responses that `max_response_tokens` cuts off: what a response length that runs away ends in."""
    max_duplicate_share: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Largest share of samples that have a twin: another sample of the same prompt with the same text. Short answers have twins without any
    collapse, so that this bound depends on the task."""

    @model_validator(mode="after")
    def _something_is_bounded(self) -> Self:
        bounds = [name for name in type(self).model_fields if name.startswith(("min_", "max_"))]
        if all(getattr(self, name) is None for name in bounds):
            raise ValueError(f"nothing is bounded; set one of {', '.join(bounds)}, or collapse to null")
        return self


class EndsConfig(Settings):
    """What ends a stage before `steps`, which stays the most that it does. Schedules of learning rates go by `steps`, whenever the stage ends."""

    convergence: ConvergenceConfig | None = None
    """The stage is then finished, and the next one begins. null leaves it out."""
    collapse: CollapseConfig | None = None
    """The run then fails with a verdict, after the stage's weights were exported as they are. null leaves it out."""

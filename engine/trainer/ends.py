"""Whether an RL stage is done, or has collapsed: pure functions of the metrics of its steps so far."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from engine.config import CollapseConfig, ConvergenceConfig, RLStageConfig

History = Sequence[Mapping[str, float]]
"""Metrics of each step of a stage, in order. A step that trained on nothing has fewer."""

REWARD, LENGTH = "reward/mean", "response/tokens_mean"


class CollapseError(RuntimeError):
    """The policy of a stage has collapsed: what more steps would make of it is not worth their time."""


@dataclass(frozen=True, slots=True)
class Trend:
    """The straight line through a metric's last steps, and by how much it may grow."""

    metric: str
    slope: float
    """Least squares, a step."""
    high: float
    """Upper end of its one-sided confidence interval."""
    bound: float
    """Largest `high` that counts as not growing."""

    @property
    def flat(self) -> bool:
        """Whether the metric has stopped to grow."""
        return self.high <= self.bound

    def metrics(self) -> dict[str, float]:
        """Slope and upper end as shares of the bound: the metric is flat where the second is at most 1."""
        scale, name = self.bound or 1.0, self.metric.replace("/", "_")
        return {f"ends/{name}_slope": self.slope / scale, f"ends/{name}_slope_high": self.high / scale}

    def __str__(self) -> str:
        return f"{self.metric} changes by {self.slope:+.3g} a step, at most {self.high:+.3g} (allowed: {self.bound:.3g})"


def trends(history: History, config: ConvergenceConfig) -> list[Trend]:
    """Of reward and response length over the last `window_steps` steps; none as long as there are not so many.

    With y_i at step x_i, n of them:

        slope b = sum (x_i - x)(y_i - y) / S,  S = sum (x_i - x)^2 = n (n^2 - 1) / 12
        its standard error s = sqrt(sum of squared residuals / (n - 2) / S)
        high = b + z s,  z the normal quantile of `confidence`   (n is at least 20, where Student's is 5 % larger)
        flat where high <= growth * mean |y_i|

    The errors are taken for independent. A window without noise, such as a reward that is always 0, has s = 0.
    """
    window = history[-config.window_steps :]
    if len(window) < config.window_steps:
        return []
    z = NormalDist().inv_cdf(config.confidence)
    found = []
    for metric, growth in ((REWARD, config.max_reward_growth), (LENGTH, config.max_length_growth)):
        y = np.array([step[metric] for step in window])
        x = np.arange(len(y)) - (len(y) - 1) / 2
        spread = float(x @ x)
        slope = float(x @ y) / spread
        residuals = y - y.mean() - slope * x
        error = math.sqrt(float(residuals @ residuals) / (len(y) - 2) / spread)
        found.append(Trend(metric, slope, slope + z * error, growth * float(np.abs(y).mean())))
    return found


def converged(history: History, config: ConvergenceConfig) -> str | None:
    """Why the stage is done, with the numbers; None while it goes on."""
    found = trends(history, config) if len(history) >= config.min_steps else []
    if not found or not all(trend.flat for trend in found):
        return None
    return f"over the last {config.window_steps} steps " + ", and ".join(map(str, found))


@dataclass(frozen=True, slots=True)
class Bound:
    """One sign of a collapse."""

    setting: str
    """Key and value that the recipe gives."""
    metric: str
    value: float
    lowest: bool
    """The metric must not fall below it; else not rise above."""
    since: int = 0
    """Observations before the bound is looked at."""

    def passed(self, value: float) -> bool:
        """Whether a step's value is beyond it. One that is no number is."""
        return not (value >= self.value if self.lowest else value <= self.value)

    def newest_beyond(self, history: History) -> list[float]:
        """Values of the newest steps that passed it without a break; steps without the metric are passed over."""
        values = [step[self.metric] for step in history if self.metric in step][self.since :]
        sound = [place for place, value in enumerate(values) if not self.passed(value)]
        return values[sound[-1] + 1 :] if sound else values


def collapsed(history: History, config: CollapseConfig) -> str | None:
    """The verdict on a policy that passed a bound for `patience_steps` steps in a row: the bound, the values, what to do. None while it is sound."""
    for bound in _bounds(history, config):
        values = bound.newest_beyond(history)
        if len(values) >= config.patience_steps:
            return (
                f"{bound.metric} has been {'below' if bound.lowest else 'above'} {bound.value:.3g} (ends.collapse.{bound.setting}) for {len(values)} "
                f"steps, lately {', '.join(f'{value:.3g}' for value in values[-5:])}. {_REMEDIES[bound.metric]}; change the bound if this is meant"
            )
    return None


_ENTROPY, _ENTROPY_AT_1 = "policy/entropy", "policy/entropy_temperature_1"
_TRUNCATED, _DUPLICATES = "response/truncated_fraction", "response/duplicate_share"
_CERTAIN = "The policy says nearly the same whatever it is asked: start again with a higher temperature, a lower learning rate or an entropy bonus"
_REMEDIES = {
    _ENTROPY: _CERTAIN,
    _ENTROPY_AT_1: _CERTAIN,
    LENGTH: "Look at the samples for what earns the reward without a full answer",
    _TRUNCATED: "Look at the samples for repetition: start again with a lower temperature or learning rate, or raise max_response_tokens",
    _DUPLICATES: "Groups have little left to compare: start again with a higher temperature, or drop the prompts that are always answered right",
}


def _bounds(history: History, config: CollapseConfig) -> list[Bound]:
    # A stage that samples at 1 has one entropy; of another's, that at 1 is the policy's own.
    entropy = _ENTROPY_AT_1 if any(_ENTROPY_AT_1 in step for step in history) else _ENTROPY
    bounds = []
    for key, metric in (("min_entropy_nats", entropy), ("max_truncated_share", _TRUNCATED), ("max_duplicate_share", _DUPLICATES)):
        if (value := getattr(config, key)) is not None:
            bounds.append(Bound(f"{key}={value:g}", metric, value, lowest=key.startswith("min_")))
    for key, metric in (("min_entropy_share", entropy), ("min_length_share", LENGTH)):
        first = [step[metric] for step in history if metric in step][: config.baseline_steps]
        if (share := getattr(config, key)) is not None and len(first) == config.baseline_steps:
            value = share * math.fsum(first) / len(first)
            bounds.append(Bound(f"{key}={share:g}", metric, value, lowest=True, since=config.baseline_steps))
    return bounds


@dataclass(frozen=True, slots=True)
class End:
    """Why a stage does no further step."""

    by: Literal["steps", "convergence", "collapse"]
    why: str = ""


def ended(history: History, config: RLStageConfig) -> End | None:
    """Whether the newest step was the stage's last. A policy that has collapsed has stopped to grow as well, and is told as collapsed."""
    ends = config.ends
    if ends.collapse is not None and (why := collapsed(history, ends.collapse)):
        return End("collapse", why)
    if ends.convergence is not None and (why := converged(history, ends.convergence)):
        return End("convergence", why)
    return End("steps") if len(history) >= config.steps else None


def progress(history: History, config: RLStageConfig) -> dict[str, float]:
    """Metrics of how near the stage is to its end by convergence; none without that rule, or before its window is full."""
    if config.ends.convergence is None:
        return {}
    return {name: value for trend in trends(history, config.ends.convergence) for name, value in trend.metrics().items()}

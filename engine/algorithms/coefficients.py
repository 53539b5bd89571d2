"""What the terms beside the policy loss are multiplied by, and the controllers that move it from step to step."""

import math
from dataclasses import dataclass, replace
from typing import Self

from engine.config import AdaptiveEntropyConfig, AdaptiveKLConfig, AlgorithmConfig

MAX_KL_ERROR = 0.2
"""A distance that is further off than this share of its target moves the coefficient no faster."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What controllers look at: means over all response tokens of a step that are learnt from, of the policy at its start."""

    kl: float
    """Distance from the reference by the penalty's estimator, nats per token; 0 without a reference."""
    entropy: float
    """nats per token, at the rollout's temperature; 0 without a bonus."""
    samples: int
    """Samples with a response token that is learnt from."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Of the KL penalty and of the entropy bonus. State of the actor from step to step, part of what is kept of it."""

    kl: float = 0.0
    entropy: float = 0.0

    @classmethod
    def first(cls, config: AlgorithmConfig) -> Self:
        """Those that a stage begins with; 0 where it has no such term."""
        return cls(kl=config.kl.coefficient if config.kl else 0.0, entropy=config.entropy.coefficient if config.entropy else 0.0)

    def in_force(self, config: AlgorithmConfig, observed: Observed) -> Self:
        """Those of a step: an adaptive bonus is given only while the entropy is not above its target."""
        adaptive = config.entropy.adaptive if config.entropy else None
        return replace(self, entropy=0.0) if adaptive is not None and not observed.entropy <= adaptive.target else self

    def after(self, config: AlgorithmConfig, observed: Observed) -> Self:
        """Those of the next step."""
        moved = self
        if config.kl is not None and config.kl.adaptive is not None:
            moved = replace(moved, kl=adapted_kl(moved.kl, observed.kl, observed.samples, config.kl.adaptive))
        if config.entropy is not None and config.entropy.adaptive is not None:
            moved = replace(moved, entropy=adapted_entropy(moved.entropy, observed.entropy, config.entropy.adaptive))
        return moved


def adapted_kl(coefficient: float, distance: float, samples: int, config: AdaptiveKLConfig) -> float:
    """coefficient (1 + clip(distance / target - 1, +-0.2) samples / horizon): Ziegler et al. 2019, arXiv:1909.08593, section 2.2.

    The coefficient as it is where the distance is NaN, as after a pass that went wrong: it would never be a number again.
    """
    if math.isnan(distance):
        return coefficient
    error = min(max(distance / config.target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
    # More samples a step than 5 horizons would make it negative.
    return coefficient * max(0.0, 1 + error * samples / config.horizon)


def adapted_entropy(coefficient: float, entropy: float, config: AdaptiveEntropyConfig) -> float:
    """Up a step where the entropy is below its target, down one where it is above, within 0 and the maximum: Skywork-OR1, arXiv:2505.22312."""
    direction = (entropy < config.target) - (entropy > config.target)
    return min(max(coefficient + direction * config.step, 0.0), config.maximum)

"""A penalty on the distance from a reference policy."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.config.base import Positive, Settings


class AdaptiveKLConfig(Settings):
    """After each step: coefficient *= 1 + clip(distance / target - 1, +-0.2) x samples / horizon (Ziegler et al. 2019, arXiv:1909.08593,
    section 2.2)."""

    target: Annotated[float, Field(gt=0)]
    """Distance that the coefficient is moved towards, nats per response token, by the estimator of the penalty."""
    horizon: Positive
    """Samples over which a distance that is off by 20 % or more changes the coefficient by about 20 %."""


class KLConfig(Settings):
    """A penalty on the distance from the reference, which is the policy that the stage began with."""

    coefficient: Annotated[float, Field(gt=0)]
    """Nats are multiplied by it; where it is `adaptive`, at first."""
    estimator: Literal["k1", "k2", "k3", "abs", "k1_k2grad", "k3_k2grad", "abs_k2grad"] = "k3"
    """Schulman 2020, "Approximating KL Divergence". `_k2grad`: the value of the one and the gradient of k2, which is that of the divergence."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: a term beside the policy loss, with a gradient. `reward`: subtracted from the reward of each response token, for estimators that read
    rewards by token: gae, reinforce_plus_plus, remax, optimal_token_baseline."""
    adaptive: AdaptiveKLConfig | None = None
    reset_reference_every_steps: Positive | None = None
    """After so many steps, and again after as many, the reference becomes the policy as it is then (ProRL, arXiv:2505.24864); null never does."""
    reset_optimizer: bool = False
    """With each reset of the reference the policy's optimizer starts afresh, its warm-up and schedule over the steps that are left."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.place == "reward" and self.estimator.endswith("_k2grad"):
            base = self.estimator.removesuffix("_k2grad")
            raise ValueError(f"estimator={self.estimator} has the gradient of k2, and a reward has none; set estimator={base}, or place=loss")
        if self.reset_optimizer and self.reset_reference_every_steps is None:
            raise ValueError("reset_optimizer goes with the reference's reset; set reset_reference_every_steps, or leave it out")
        return self

"""Policy losses: what turns advantages into a gradient. One class each, chosen by `name`."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, Tag, model_validator

from engine.config.base import OWN, Fraction, Positive, Settings, chosen_by, name_known

if TYPE_CHECKING:
    from engine.algorithms.types import LossFunction
    from engine.registry import Registry

Bound = Annotated[float, Field(gt=0)]
Aggregation = Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "sequence_sum_constant"]


class LossSettings(Settings):
    """How the terms of the tokens become a number. A loss whose terms are of whole sequences accepts fewer aggregations."""

    has_ratio: ClassVar[bool] = True
    """It corrects for a policy that has moved since the step began: several updates a step make sense."""
    ratio_to_rollout: ClassVar[bool] = False
    """Its ratio is to the rollout engine's log-probs, so that off-policy weights would count their distance twice."""

    name: str
    aggregation: Aggregation = "token_mean"
    """`token_mean`: every token of the optimizer step weighs the same. The others: every sequence does, by the sum of its terms, by their mean, or by
    their sum over `aggregation_constant_tokens`."""
    aggregation_constant_tokens: Positive | None = None
    """Tokens that `sequence_sum_constant` divides each sequence's sum by (Dr. GRPO); refused for the other aggregations."""

    @model_validator(mode="after")
    def _constant_where_used(self) -> Self:
        if (self.aggregation == "sequence_sum_constant") != (self.aggregation_constant_tokens is not None):
            raise ValueError("aggregation_constant_tokens goes with aggregation=sequence_sum_constant, and only with it")
        return self


class SequenceLossSettings(LossSettings):
    """Of a loss with one ratio a sequence: each sequence weighs the same, whatever its length."""

    aggregation: Literal["sequence_mean_token_mean"] = "sequence_mean_token_mean"
    """The terms of a sequence are equal, or their gradients add up to that of its ratio; another mean would weigh by length."""


class ClippedLossSettings(LossSettings):
    """The trust region of PPO: the ratio to the older policy may leave [1 - clip_low, 1 + clip_high] only to come back."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Bound = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Bound on ratio x |advantage| for negative advantages; null leaves it out."""


class PPOLossConfig(ClippedLossSettings):
    """Clipped policy loss (PPO, arXiv:1707.06347, equation 7), asymmetric (DAPO, arXiv:2503.14476) and dual (arXiv:1912.09729)."""

    name: Literal["ppo"] = "ppo"


class GSPOLossConfig(SequenceLossSettings):
    """PPO's clip on one ratio a sequence, the geometric mean of its tokens' (Zheng et al. 2025, arXiv:2507.18071)."""

    name: Literal["gspo"]
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    clip_high: Bound = 4e-4


class GMPOLossConfig(SequenceLossSettings):
    """Geometric mean of the tokens' clipped ratios (Zhao et al. 2025, arXiv:2507.20673)."""

    name: Literal["gmpo"]
    clip_low: Bound = 0.4
    """Nats: the log-ratio of a token is clipped, to [-clip_low, clip_high]."""
    clip_high: Bound = 0.4


class SAPOLossConfig(LossSettings):
    """A soft gate on the ratio in place of a clip (Gao et al. 2025, arXiv:2511.20347)."""

    name: Literal["sapo"]
    tau_positive: Bound = 1.0
    """How fast the gate closes as the ratio leaves 1, for advantages above 0."""
    tau_negative: Bound = 1.05
    """The same for the other advantages."""


class CISPOLossConfig(LossSettings):
    """REINFORCE with clipped importance weights, which keep every token's gradient (MiniMax 2025, arXiv:2506.13585)."""

    name: Literal["cispo"]
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    """Weights are at least 1 - clip_low; null bounds them from above only, as the paper's runs do."""
    clip_high: Bound = 4.0
    """Weights are at most 1 + clip_high, which is the paper's to choose and not given there: 5 as in ScaleRL (arXiv:2510.13786)."""


class ReinforceLossConfig(LossSettings):
    """Advantage x log-prob, without ratio and clip (Williams 1992, Machine Learning 8): for updates_per_step=1."""

    has_ratio: ClassVar = False

    name: Literal["reinforce"]


class GPGLossConfig(LossSettings):
    """The loss of Group Policy Gradient, which is REINFORCE's (Chu et al. 2025, arXiv:2504.02546)."""

    has_ratio: ClassVar = False

    name: Literal["gpg"]


class ClipCovLossConfig(ClippedLossSettings):
    """PPO, and some of the tokens that take entropy away get no gradient (Clip-Cov, Cui et al. 2025, arXiv:2505.22617)."""

    name: Literal["clip_cov"]
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on ratio x |advantage| for negative advantages; null leaves it out."""
    fraction: Fraction = 2e-4
    """Of the response tokens of the step, chosen at random among those of the band, get no gradient."""
    covariance_low: float = 1.0
    """The band of (A - mean A)(log-prob - mean log-prob) to choose from, means over the step's response tokens: from here"""
    covariance_high: float = 5.0
    """to here."""

    @model_validator(mode="after")
    def _band_in_order(self) -> Self:
        if self.covariance_high <= self.covariance_low:
            raise ValueError(f"covariance_high ({self.covariance_high:g}) must be above covariance_low ({self.covariance_low:g})")
        return self


class KLCovLossConfig(LossSettings):
    """Ratio without clip; tokens that take most entropy away are held back by a KL term (KL-Cov, Cui et al. 2025, arXiv:2505.22617)."""

    name: Literal["kl_cov"]
    fraction: Fraction = 2e-4
    """Of the response tokens of the step, those with the largest (A - mean A)(log-prob - mean log-prob), get the term."""
    coefficient: Bound = 1.0
    """Of |log-prob - old log-prob|."""


class DPPOLossConfig(ClippedLossSettings):
    """PPO whose trust region is around the policy that drew the samples, as the rollout engine reported it (Qi et al. 2026, arXiv:2602.04879, whose
    bound on probabilities in place of ratios is left out)."""

    ratio_to_rollout: ClassVar = True

    name: Literal["dppo"]


class OwnLossConfig(LossSettings):
    """A function of one's own (docs/extending.md), whose name is `module:function`."""

    parameters: dict[str, Any] = {}
    """Reach the function as `config.parameters`."""


def _registry() -> "Registry[LossFunction]":
    from engine.algorithms.registry import LOSSES

    return LOSSES


LossConfig = Annotated[
    Annotated[PPOLossConfig, Tag("ppo")]
    | Annotated[GSPOLossConfig, Tag("gspo")]
    | Annotated[GMPOLossConfig, Tag("gmpo")]
    | Annotated[SAPOLossConfig, Tag("sapo")]
    | Annotated[CISPOLossConfig, Tag("cispo")]
    | Annotated[ReinforceLossConfig, Tag("reinforce")]
    | Annotated[GPGLossConfig, Tag("gpg")]
    | Annotated[ClipCovLossConfig, Tag("clip_cov")]
    | Annotated[KLCovLossConfig, Tag("kl_cov")]
    | Annotated[DPPOLossConfig, Tag("dppo")]
    | Annotated[OwnLossConfig, Tag(OWN)],
    chosen_by("name", default="ppo"),
    name_known(_registry, "name"),
]
"""A loss with its parameters; those of another are refused."""

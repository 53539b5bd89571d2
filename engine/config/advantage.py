"""Advantage estimators: what turns the scores of a step into an advantage of each token. One class each, chosen by `estimator`."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from engine.config.base import OWN, Settings, chosen_by, name_known

if TYPE_CHECKING:
    from engine.algorithms.types import AdvantageFunction
    from engine.registry import Registry

Discount = Annotated[float, Field(gt=0, le=1)]


class AdvantageSettings(Settings):
    """What the rest of the algorithm has to know of an estimator."""

    reads_values: ClassVar[bool] = False
    """It can use a critic's values."""
    needs_critic: ClassVar[bool] = False
    """It cannot do without them."""
    needs_greedy: ClassVar[bool] = False
    """Each prompt has to be answered greedily too, and that answer scored."""
    needs_squared_probabilities: ClassVar[bool] = False
    """The sum of the squared probabilities of the vocabulary has to be computed beside each log-prob."""
    reads_token_rewards: ClassVar[bool] = False
    """Tokens may have rewards of their own, such as a KL penalty; the others know one reward a sample."""
    group_relative: ClassVar[bool] = False
    """It compares the samples of one prompt: a group of one, or of equal rewards, teaches nothing."""


class GAEAdvantageConfig(AdvantageSettings):
    """Generalised advantage estimation from a critic's values (Schulman et al. 2016, arXiv:1506.02438)."""

    reads_values: ClassVar = True
    needs_critic: ClassVar = True
    reads_token_rewards: ClassVar = True

    estimator: Literal["gae"]
    gamma: Discount = 1.0
    """Discount of the reward by response token."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """0 trusts the critic's next value, 1 the rewards alone."""
    whiten: bool = True
    """Advantages of a step get mean 0 and deviation 1 over its response tokens."""


class GRPOAdvantageConfig(AdvantageSettings):
    """Rewards centred in their group and scaled (Shao et al. 2024, arXiv:2402.03300)."""

    group_relative: ClassVar = True

    estimator: Literal["grpo"] = "grpo"
    scale: Literal["group", "batch", "minibatch", "none"] = "group"
    """What centred rewards are divided by: the standard deviation of the rewards of the group, or of the batch (arXiv:2508.08221), that of the
    centred rewards of the optimizer's mini-batch (Magistral, arXiv:2506.10910), or nothing (Dr. GRPO, arXiv:2503.20783)."""


class RLOOAdvantageConfig(AdvantageSettings):
    """Each reward minus the mean of the others of its group (Ahmadian et al. 2024, arXiv:2402.14740)."""

    group_relative: ClassVar = True

    estimator: Literal["rloo"]


class GRPOPassKAdvantageConfig(AdvantageSettings):
    """Only the best sample of a group learns, by how far it is ahead of the second (Tang et al. 2025, arXiv:2503.19595)."""

    group_relative: ClassVar = True

    estimator: Literal["grpo_pass_k"]


class ReinforcePlusPlusAdvantageConfig(AdvantageSettings):
    """Discounted reward to go, whitened over the step (REINFORCE++, Hu et al. 2025, arXiv:2501.03262)."""

    reads_token_rewards: ClassVar = True

    estimator: Literal["reinforce_plus_plus"]
    gamma: Discount = 1.0
    """Discount of the reward by response token."""


class ReinforcePlusPlusBaselineAdvantageConfig(AdvantageSettings):
    """Rewards centred in their group, whitened over the tokens of the step (REINFORCE++-baseline, arXiv:2501.03262)."""

    group_relative: ClassVar = True

    estimator: Literal["reinforce_plus_plus_baseline"]


class OPOAdvantageConfig(AdvantageSettings):
    """Rewards minus the mean of their group that weighs samples by length (Hao et al. 2025, arXiv:2505.23585)."""

    group_relative: ClassVar = True

    estimator: Literal["opo"]


class ReMaxAdvantageConfig(AdvantageSettings):
    """Reward to go minus the reward of the greedy answer to the same prompt (Li et al. 2023, arXiv:2310.10505)."""

    needs_greedy: ClassVar = True
    reads_token_rewards: ClassVar = True

    estimator: Literal["remax"]


class GPGAdvantageConfig(AdvantageSettings):
    """Rewards centred in their group, more the fewer samples of the step have one (Chu et al. 2025, arXiv:2504.02546)."""

    group_relative: ClassVar = True

    estimator: Literal["gpg"]


class OptimalTokenBaselineAdvantageConfig(AdvantageSettings):
    """Reward to go minus the baseline of least variance for each token (Li et al. 2026, arXiv:2602.07078)."""

    needs_squared_probabilities: ClassVar = True
    reads_token_rewards: ClassVar = True
    group_relative: ClassVar = True

    estimator: Literal["optimal_token_baseline"]


class OwnAdvantageConfig(AdvantageSettings):
    """A function of one's own (docs/extending.md)."""

    reads_values: ClassVar = True
    reads_token_rewards: ClassVar = True

    estimator: str
    parameters: dict[str, Any] = {}
    """Reach the function as `config.parameters`."""


def _registry() -> "Registry[AdvantageFunction]":
    from engine.algorithms.registry import ADVANTAGES

    return ADVANTAGES


AdvantageConfig = Annotated[
    Annotated[GRPOAdvantageConfig, Tag("grpo")]
    | Annotated[GAEAdvantageConfig, Tag("gae")]
    | Annotated[RLOOAdvantageConfig, Tag("rloo")]
    | Annotated[GRPOPassKAdvantageConfig, Tag("grpo_pass_k")]
    | Annotated[ReinforcePlusPlusAdvantageConfig, Tag("reinforce_plus_plus")]
    | Annotated[ReinforcePlusPlusBaselineAdvantageConfig, Tag("reinforce_plus_plus_baseline")]
    | Annotated[OPOAdvantageConfig, Tag("opo")]
    | Annotated[ReMaxAdvantageConfig, Tag("remax")]
    | Annotated[GPGAdvantageConfig, Tag("gpg")]
    | Annotated[OptimalTokenBaselineAdvantageConfig, Tag("optimal_token_baseline")]
    | Annotated[OwnAdvantageConfig, Tag(OWN)],
    chosen_by("estimator", default="grpo"),
    name_known(_registry, "estimator"),
]
"""An estimator with its parameters; those of another are refused."""

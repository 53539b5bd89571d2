"""One pass's share of the policy's loss: the configured loss, weighted for what the rollout drew otherwise, and what stands beside it."""

from collections.abc import Mapping

from torch import Tensor

from engine.algorithms.aggregation import Denominators, aggregate
from engine.algorithms.coefficients import Coefficients
from engine.algorithms.kl import kl
from engine.algorithms.step import policy_terms
from engine.algorithms.types import LossInputs
from engine.config import AlgorithmConfig
from engine.metrics import Mean, Statistics, Sum


def policy_loss(
    columns: Mapping[str, Tensor],
    log_probs: Tensor,
    entropy: Tensor | None,
    config: AlgorithmConfig,
    coefficients: Coefficients,
    denominators: Denominators,
) -> tuple[Tensor, Statistics]:
    """aggregate(weight x policy term) + kl aggregate(distance) - entropy aggregate(entropy), the parts aggregated alike.

    The shares of all passes of all ranks add up to the loss of the optimizer step, and so do their gradients.

    Args:
        columns: response_mask, old_log_probs, rollout_log_probs, advantages [B, T]; off_policy_weights [B, T], constants of the loss, where they
            are corrected for; reference_log_probs [B, T] where the loss has a KL term; selected [B, T] bool where it reads it.
        log_probs: [B, T] of the policy being trained, with gradient.
        entropy: [B, T] of the same, with gradient; None without a bonus.
        config: of the stage.
        coefficients: in force in this step.
        denominators: counts of the whole optimizer step.

    Returns:
        A scalar with gradient; and `policy/loss`, `policy/kl_reference` and the loss's own statistics. Raises what `policy_terms` raises.
    """
    mask, statistics = columns["response_mask"], Statistics()
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=columns["old_log_probs"],
        rollout_log_probs=columns["rollout_log_probs"],
        advantages=columns["advantages"],
        mask=mask,
        selected=columns.get("selected"),
    )

    def aggregated(per_token: Tensor) -> Tensor:
        return aggregate(per_token, mask, denominators, config.loss.aggregation, config.loss.aggregation_constant_tokens)

    terms = policy_terms(inputs, config.loss)
    statistics.update(terms.statistics)
    weights = columns.get("off_policy_weights")
    value = aggregated(terms.per_token if weights is None else terms.per_token * weights)
    if config.kl is not None and config.kl.place == "loss":
        distance = kl(config.kl.estimator, log_probs, columns["reference_log_probs"], mask)
        value = value + coefficients.kl * aggregated(distance)
        statistics.add("policy/kl_reference", Mean(float(distance.detach().sum()), float(mask.count_nonzero())))
    if entropy is not None:
        value = value - coefficients.entropy * aggregated(entropy)
    statistics.add("policy/loss", Sum(float(value.detach())))
    return value, statistics

"""How much each token of a step takes away from the policy's entropy.

Cui et al. 2025, arXiv:2505.22617, section 4: with small steps the entropy falls by the covariance of log-prob and advantage, to which few tokens give
nearly all.
"""

from torch import Tensor


def covariances(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """(A - mean A)(lp - mean lp) of N response tokens, [N] each, in float64; the means are over all of them."""
    log_probs, advantages = log_probs.double(), advantages.double()
    return (advantages - advantages.mean()) * (log_probs - log_probs.mean())

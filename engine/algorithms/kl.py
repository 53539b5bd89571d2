"""Per-token estimators of the KL divergence from samples (Schulman 2020, "Approximating KL Divergence", joschu.net/blog/kl-approx.html)."""

from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def kl(kind: str, log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Estimates of KL(policy || reference) at tokens that the policy drew.

    With d = log_probs - reference_log_probs clamped to +-20: `k1` = d (unbiased, noisy), `abs` = |d| (biased), `k2` = d^2 / 2 (biased, its
    gradient is right), `k3` = exp(-d) + d - 1, clamped to +-10 (unbiased, never negative). Where a clamp acts there is no gradient.
    `k1_k2grad`, `abs_k2grad` and `k3_k2grad` have the value of the one and the gradient of k2, d: its mean over tokens that the policy drew is the
    gradient of the divergence, which the gradients of k1 (of mean 0) and k3 are not (Liu et al. 2025, arXiv:2510.01555).

    Args:
        kind: one of `names()`.
        log_probs: [B, T] of the policy that drew the tokens.
        reference_log_probs: [B, T] of the other policy.
        mask: [B, T] bool.

    Returns:
        [B, T], nats per token, 0 outside the mask.
    """
    if kind not in _ESTIMATORS:
        raise ValueError(f"no KL estimator is called {kind!r}. There are: {', '.join(names())}")
    difference = torch.where(mask, log_probs - reference_log_probs, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return _ESTIMATORS[kind](difference)  # each is 0 at d = 0, so masked tokens stay 0


def names() -> list[str]:
    """All estimators."""
    return sorted(_ESTIMATORS)


def _straight_through(estimator: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def value_of_one_gradient_of_k2(difference: Tensor) -> Tensor:
        k2 = _k2(difference)
        return estimator(difference).detach() + (k2 - k2.detach())

    return value_of_one_gradient_of_k2


def _k1(difference: Tensor) -> Tensor:
    return difference


def _abs(difference: Tensor) -> Tensor:
    return difference.abs()


def _k2(difference: Tensor) -> Tensor:
    return difference.square() / 2


def _k3(difference: Tensor) -> Tensor:
    # expm1 rather than exp(-d) - 1: at the differences of two sound engines (1e-7) the latter is rounding noise, negative as often as not.
    return (torch.expm1(-difference) + difference).clamp(-MAX_K3, MAX_K3)


_BIASED_GRADIENT: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "abs": _abs, "k3": _k3}
_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    **_BIASED_GRADIENT,
    "k2": _k2,
    **{f"{name}_k2grad": _straight_through(estimator) for name, estimator in _BIASED_GRADIENT.items()},
}

"""Clipped value loss: what a critic is trained by.

PPO, Schulman et al. 2017, arXiv:1707.06347, section 5; the clip on the value's movement is that of its authors' code (Engstrom et al. 2020,
arXiv:2005.12729, section 3).
"""

import torch
from torch import Tensor

from engine.algorithms.types import LossTerms
from engine.metrics import ExplainedVariance, Mean, Moments, Statistics


def loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> LossTerms:
    """0.5 max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2).

    Args:
        values: [B, T] V of the critic being trained; the only input with a gradient.
        old_values: [B, T] V_old, of the critic at the start of the step.
        returns: [B, T] G.
        mask: [B, T] bool. Whatever stands elsewhere, NaN included, has no effect.
        clip: c; None leaves the second term and the max out.

    Returns:
        Terms [B, T], 0 outside the mask; `critic/clip_fraction`, the share of response tokens that the clip keeps from moving further
        away from V_old; `critic/explained_variance`, 1 - Var(G - V_old) / Var(G) over response tokens. Both merge exactly.
    """
    # Excluding before anything is computed: a masked NaN would come back through the gradient otherwise.
    values, old_values, returns = (torch.where(mask, tensor, 0) for tensor in (values, old_values, returns))
    squares = (values - returns).square()
    if clip is None:
        return LossTerms(per_token=squares / 2, statistics=_statistics(torch.zeros_like(mask), old_values, returns, mask))
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return LossTerms(
        per_token=torch.maximum(squares, clipped) / 2,
        statistics=_statistics(clipped > squares, old_values, returns, mask),
    )


def _statistics(cut: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> Statistics:
    target = returns.double()
    error = target - old_values.double()
    sums = torch.stack(
        [cut.count_nonzero().double(), mask.count_nonzero().double(), target.sum(), target.square().sum(), error.sum(), error.square().sum()]
    )
    cut_total, tokens, total, squares, error_total, error_squares = sums.tolist()  # one wait for the device
    statistics = Statistics()
    statistics.add("critic/clip_fraction", Mean(cut_total, tokens))
    explained = ExplainedVariance(Moments(total, squares, tokens), Moments(error_total, error_squares, tokens))
    statistics.add("critic/explained_variance", explained)
    return statistics

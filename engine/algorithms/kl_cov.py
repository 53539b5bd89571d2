"""KL-Cov: no clip, and the tokens that take away most entropy are held where they were.

Cui et al. 2025, arXiv:2505.22617, section 4.2, equations 14 and 15. Tokens are selected once a step, from the log-probs that it begins with: at its
first update, where lp = olp, that is the paper's formula (and the term is 0, so that it shows from the second update on).
"""

import math

import numpy as np
import torch
from torch import Tensor

from engine.algorithms.ratio import fractions, log_ratio
from engine.algorithms.types import LossInputs, LossTerms
from engine.config import KLCovLossConfig


def select(covariance: Tensor, config: KLCovLossConfig, generator: np.random.Generator) -> Tensor:
    """The floor(fraction x N) of the N tokens with the largest covariance; of equal ones the first. Draws nothing."""
    number = math.floor(config.fraction * len(covariance))
    if number == 0:
        return torch.zeros_like(covariance, dtype=torch.bool)
    least = covariance.topk(number, sorted=False).values.min()
    above, equal = covariance > least, covariance == least
    return above | (equal & (equal.cumsum(0) <= number - above.sum()))


def loss(inputs: LossInputs, config: KLCovLossConfig) -> LossTerms:
    """Advantage x ratio, and a KL term on the selected tokens.

    -A rho, + coefficient |d| where selected; d = lp - olp clamped to +-20, rho = exp(d).

    Returns:
        Terms [B, T], 0 outside the mask; `policy/kl_covariance_fraction`, the share of response tokens with the KL term. ValueError without
        `selected`.
    """
    selected = inputs.needed_selection()
    difference = log_ratio(inputs.log_probs, inputs.old_log_probs, inputs.mask)
    terms = -torch.where(inputs.mask, inputs.advantages, 0) * difference.exp()
    held = torch.where(selected & inputs.mask, config.coefficient * difference.abs(), 0)
    return LossTerms(per_token=terms + held, statistics=fractions({"policy/kl_covariance_fraction": selected}, inputs.mask))

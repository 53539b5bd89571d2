"""Clip-Cov: PPO, and a few of the tokens that take away most entropy get no gradient.

Cui et al. 2025, arXiv:2505.22617, section 4.2, equations 11 to 13. Tokens are selected once a step, from the log-probs that it begins with: at its
first update, where lp = olp, that is the paper's formula; later updates of the step keep the selection.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.algorithms import ppo
from engine.algorithms.ratio import fractions
from engine.algorithms.types import LossInputs, LossTerms
from engine.config import ClipCovLossConfig


def select(covariance: Tensor, config: ClipCovLossConfig, generator: np.random.Generator) -> Tensor:
    """floor(fraction x N) of the N tokens, or as many as there are, drawn evenly from those with covariance_low < covariance < covariance_high."""
    band = ((covariance > config.covariance_low) & (covariance < config.covariance_high)).nonzero().squeeze(1)
    number = min(math.floor(config.fraction * len(covariance)), len(band))
    chosen = generator.choice(len(band), number, replace=False)
    return torch.zeros_like(covariance, dtype=torch.bool).index_fill(0, band[torch.from_numpy(chosen)], True)


def loss(inputs: LossInputs, config: ClipCovLossConfig) -> LossTerms:
    """PPO's loss; the selected tokens have the term 0.

    Returns:
        Terms [B, T], 0 outside the mask; PPO's shares, and `policy/clip_fraction_covariance`, that of the selected tokens. ValueError without
        `selected`.
    """
    selected = inputs.needed_selection()
    terms = ppo.loss(inputs, config)
    terms.statistics.update(fractions({"policy/clip_fraction_covariance": selected}, inputs.mask))
    return replace(terms, per_token=torch.where(selected, 0, terms.per_token))

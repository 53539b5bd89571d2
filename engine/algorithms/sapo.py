"""Soft Adaptive Policy Optimization: the further a token's ratio is from 1, the less of its gradient is left; nothing is cut off.

Gao et al. 2025, arXiv:2511.20347, equations 5 and 6.
"""

import torch

from engine.algorithms.ratio import log_ratio
from engine.algorithms.types import LossInputs, LossTerms
from engine.config import SAPOLossConfig
from engine.metrics import Mean, Statistics


def loss(inputs: LossInputs, config: SAPOLossConfig) -> LossTerms:
    """Advantage x soft gate on the ratio.

    -A f(rho), f(rho) = 4 / tau sigmoid(tau (rho - 1)); tau is `tau_positive` for A > 0 and `tau_negative` otherwise; rho = exp(lp - olp), the
    difference clamped to +-20. f' is 1 at rho = 1, where the gradient is REINFORCE's.

    Returns:
        Terms [B, T], 0 outside the mask; `policy/gate`, the mean of f' over response tokens: 1 minus how much the gate dampens.
    """
    advantages = torch.where(inputs.mask, inputs.advantages, 0)
    ratio = log_ratio(inputs.log_probs, inputs.old_log_probs, inputs.mask).exp()
    tau = torch.where(advantages > 0, config.tau_positive, config.tau_negative)
    gate = torch.sigmoid(tau * (ratio - 1))
    slope = torch.where(inputs.mask, 4 * gate * (1 - gate), 0).detach()
    statistics = Statistics({"policy/gate": Mean(float(slope.sum()), float(inputs.mask.count_nonzero()))})
    return LossTerms(per_token=-advantages * 4 / tau * gate, statistics=statistics)

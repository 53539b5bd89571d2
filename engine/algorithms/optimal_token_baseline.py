"""The optimal token baseline: for each token, the baseline that makes the variance of its gradient least.

Li et al. 2026, arXiv:2602.07078. The squared gradient norm of a token is taken as that with respect to its logits,
sum_v (1[v = token] - pi_v)^2 = 1 - 2 pi_t + sum_v pi_v^2; what a token's reward to go multiplies is the gradient of all tokens up to it.
"""

import torch

from engine.algorithms.groups import Groups
from engine.algorithms.returns import Together, rewards_to_go
from engine.algorithms.types import AdvantageInputs, Advantages
from engine.config import OptimalTokenBaselineAdvantageConfig

EPSILON = 1e-8


def advantages(inputs: AdvantageInputs, config: OptimalTokenBaselineAdvantageConfig) -> Advantages:
    """Reward to go minus the mean of the group's at the same token, each weighted by its squared gradient norms up to there.

    w_t = 1 - 2 pi_t + sum_v pi_v^2, W_t = w_1 + ... + w_t, B_t = sum_g G_t W_t / (sum_g W_t + 1e-8), A_t = G_t - B_t; G the reward to go, and t
    counting response tokens. Samples that ended before t have no part in B_t.

    Returns:
        Advantages [B, T] in the type of the rewards, 0 outside the mask, in a group of one, and in a constant group where tokens have no rewards of
        their own. ValueError without old_log_probs or squared_probabilities.
    """
    who, mask = f"algorithm.advantage.estimator={config.estimator}", inputs.mask
    log_probs = inputs.needed("old_log_probs", f"{who} reads them")
    squares = inputs.needed("squared_probabilities", f"{who} reads sum_v pi_v^2 beside each log-prob")
    groups = Groups.of(inputs.rewards, inputs.group, inputs.valid)
    together, to_go = Together.of(mask), rewards_to_go(inputs)
    if inputs.token_rewards is not None:
        to_go = together.compact(to_go)
    own = together.compact(1 - 2 * log_probs.double().exp() + squares.double()).cumsum(dim=1)
    there = torch.arange(together.length, device=mask.device) < mask.sum(dim=1, keepdim=True, dtype=torch.int32)
    weight = torch.where(there, own, 0)
    zeros = weight.new_zeros(len(groups.size), weight.shape[1])
    total = zeros.index_add(0, groups.index, weight)
    baseline = zeros.index_add(0, groups.index, weight * to_go) / (total + EPSILON)
    signal = groups.informative if inputs.token_rewards is None else groups.size > 1
    return Advantages(together.spread(torch.where(signal[groups.index, None], to_go - baseline[groups.index], 0)).to(inputs.rewards.dtype))

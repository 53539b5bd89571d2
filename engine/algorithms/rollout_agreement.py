"""How far trainer and rollout engine agree about the same tokens with the same weights. Logged at every step."""

import torch
from torch import Tensor

from engine.algorithms.kl import MAX_LOG_RATIO, kl
from engine.metrics import EffectiveFraction, Maximum, Mean, Statistics


def rollout_agreement(trainer_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Statistics:
    """Agreement on response tokens; merges exactly over micro-batches and ranks.

    Args:
        trainer_log_probs: [B, T] from the trainer's forward pass at the start of the step.
        rollout_log_probs: [B, T] as the rollout engine reported them.
        mask: [B, T] bool, True on response tokens.

    Returns:
        `policy/kl_rollout`: mean over tokens of k3 of KL(rollout || trainer), the rollout having drawn the tokens, nats.
        `policy/mean_log_prob_difference`: mean over tokens of |trainer - rollout|.
        `policy/max_log_prob_difference`: largest |trainer - rollout|, not clamped; NaN if any difference is, so compare it as
        `not (difference <= limit)`; 0 without response tokens.
        `policy/rollout_effective_fraction`: effective sample size of the token weights exp(trainer - rollout) over the number of tokens.
    """
    # In float64, so that the difference of two nearly equal log-probs is exact and long sums lose nothing.
    trainer, rollout = trainer_log_probs.double(), rollout_log_probs.double()
    difference = torch.where(mask, trainer - rollout, 0)
    weights = torch.where(mask, difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0)
    k3 = kl("k3", rollout, trainer, mask)
    largest = difference.abs().max() if difference.numel() else difference.new_zeros(())
    sums = torch.stack([k3.sum(), difference.abs().sum(), largest, weights.sum(), weights.square().sum(), mask.count_nonzero().double()])
    k3_total, difference_total, largest_value, weight_total, weight_squares, tokens = sums.tolist()
    statistics = Statistics()
    statistics.add("policy/kl_rollout", Mean(k3_total, tokens))
    statistics.add("policy/mean_log_prob_difference", Mean(difference_total, tokens))
    statistics.add("policy/max_log_prob_difference", Maximum(largest_value))
    statistics.add("policy/rollout_effective_fraction", EffectiveFraction(weight_total, weight_squares, tokens))
    return statistics

"""PPO around the policy that drew the samples.

Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv:2602.04879: what the rollout engine computed drew the tokens, and
the trainer's log-probs of the same weights differ from it; a trust region around the latter lets those tokens go that differ most.
Left out: the paper's other change, a bound on how far the token's probability moves (total variation or KL) in place of one on its ratio.
"""

from dataclasses import replace

from engine.algorithms import ppo
from engine.algorithms.types import LossInputs, LossTerms
from engine.config import DPPOLossConfig


def loss(inputs: LossInputs, config: DPPOLossConfig) -> LossTerms:
    """PPO's loss with the ratio to the rollout's log-probs: rho = exp(lp - rlp)."""
    return ppo.loss(replace(inputs, old_log_probs=inputs.rollout_log_probs), config)

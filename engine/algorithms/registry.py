"""Advantage estimators and policy losses by the names that recipes use. A new one is a new file, a line here, and a class in `engine/config`."""

from typing import TYPE_CHECKING

from engine.registry import Registry

if TYPE_CHECKING:  # torch; listing names must not pay for it
    from engine.algorithms.types import AdvantageFunction, LossFunction, SelectionFunction

ADVANTAGES: "Registry[AdvantageFunction]" = Registry(
    "advantage estimator",
    {
        "gae": "engine.algorithms.gae:advantages",
        "gpg": "engine.algorithms.gpg:advantages",
        "grpo": "engine.algorithms.grpo:advantages",
        "grpo_pass_k": "engine.algorithms.grpo_pass_k:advantages",
        "opo": "engine.algorithms.opo:advantages",
        "optimal_token_baseline": "engine.algorithms.optimal_token_baseline:advantages",
        "reinforce_plus_plus": "engine.algorithms.reinforce_plus_plus:advantages",
        "reinforce_plus_plus_baseline": "engine.algorithms.reinforce_plus_plus_baseline:advantages",
        "remax": "engine.algorithms.remax:advantages",
        "rloo": "engine.algorithms.rloo:advantages",
    },
)

LOSSES: "Registry[LossFunction]" = Registry(
    "policy loss",
    {
        "cispo": "engine.algorithms.cispo:loss",
        "clip_cov": "engine.algorithms.clip_cov:loss",
        "dppo": "engine.algorithms.dppo:loss",
        "gmpo": "engine.algorithms.gmpo:loss",
        "gpg": "engine.algorithms.reinforce:loss",
        "gspo": "engine.algorithms.gspo:loss",
        "kl_cov": "engine.algorithms.kl_cov:loss",
        "ppo": "engine.algorithms.ppo:loss",
        "reinforce": "engine.algorithms.reinforce:loss",
        "sapo": "engine.algorithms.sapo:loss",
    },
)

SELECTIONS: "Registry[SelectionFunction]" = Registry(
    "selection of tokens",
    {
        "clip_cov": "engine.algorithms.clip_cov:select",
        "kl_cov": "engine.algorithms.kl_cov:select",
    },
)
"""Which tokens of the whole step a loss of this name treats differently."""

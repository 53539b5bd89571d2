"""Advantage estimators and policy losses by the names that recipes use. A new one is a new file and a line here."""

from typing import TYPE_CHECKING

from engine.registry import Registry

if TYPE_CHECKING:  # torch; listing names must not pay for it
    from engine.algorithms.types import AdvantageFunction, LossFunction

ADVANTAGES: "Registry[AdvantageFunction]" = Registry(
    "advantage estimator",
    {
        "gae": "engine.algorithms.gae:advantages",
        "grpo": "engine.algorithms.grpo:advantages",
    },
)

LOSSES: "Registry[LossFunction]" = Registry(
    "policy loss",
    {
        "ppo": "engine.algorithms.ppo:loss",
    },
)

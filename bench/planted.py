"""Faults, as bugs would make them, for bench/regressions.py. Those that no setting can make are planted by an own backend, reward or controller.

`python planted.py duplicated_prompts run ...` is `almanac run ...` with a controller that asks the first half of each step's prompts twice.
"""

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from engine.batch import Batch
from engine.rewards.exact_match import exact_match
from engine.rollout.vllm import VLLMBackend
from engine.training.backend import Measure, TokenScores
from engine.training.fsdp import FSDPBackend


class ForgetsTemperature(FSDPBackend):
    """Updates at temperature 1, whatever the rollout's is. The log-probs before the updates, which are compared with the rollout's, are right."""

    def score(self, batch: Batch, temperature: float, measures: Sequence[Measure] = ()) -> TokenScores:
        """As FSDP2's, at another temperature where a gradient is wanted."""
        return super().score(batch, 1.0 if torch.is_grad_enabled() else temperature, measures)


class StaleHead(VLLMBackend):
    """Goes on with the packed copy of the tied head that it made when it started, and says nothing of it to the proof."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        from engine.rollout import weight_transfer

        def finish(self: Any, proof: Any) -> None:
            for module in self.model.modules():
                if is_deferred_attention_layer(module):
                    module.process_weights_after_loading(self.model_config.dtype)

        weight_transfer.ReshardTransfer._finish = finish  # type: ignore[method-assign]
        super().__init__(*arguments, **named)


def noisy(response: str, ground_truth: str) -> float:
    """`exact_match`, wrong for one response in twenty: which ones, their text decides."""
    score = exact_match(response, ground_truth)
    return 1.0 - score if random.Random(f"{ground_truth} {response}").random() < 0.05 else score


def duplicate_prompts() -> None:
    """From now on the first half of each step's prompts stands in for the second."""
    from engine.prompts import PromptSampler

    honest = PromptSampler.positions

    def positions(self: PromptSampler, k: int) -> list[int]:
        found = honest(self, k)
        half = found[: (len(found) + 1) // 2]
        return [*half, *half][: len(found)]

    PromptSampler.positions = positions  # type: ignore[method-assign]


if __name__ == "__main__":
    from flows.cli import main

    {"duplicated_prompts": duplicate_prompts}[sys.argv[1]]()
    sys.argv = sys.argv[1:]
    sys.exit(main())

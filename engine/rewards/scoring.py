"""Scores for the samples of a step."""

import math
from collections.abc import Sequence
from numbers import Real

from engine.config import RewardConfig
from engine.prompts import Prompt
from engine.rewards.registry import REWARDS


def score(config: RewardConfig, responses: Sequence[str], prompts: Sequence[Prompt]) -> list[float]:
    """Scores each response with the reward that its prompt's data source asks for.

    Args:
        config: which reward for which data source.
        responses: decoded texts.
        prompts: the prompt of each response, one to one (a prompt with k samples occurs k times).

    Returns:
        One score per response, in order.

    Raises:
        ValueError: the lists differ in length, or a score is not a finite number; names reward and prompt.
    """
    if len(responses) != len(prompts):
        raise ValueError(f"{len(responses)} responses were given with {len(prompts)} prompts; each response needs its own")
    return [_score(config, response, prompt) for response, prompt in zip(responses, prompts, strict=True)]


def _score(config: RewardConfig, response: str, prompt: Prompt) -> float:
    name = config.by_data_source.get(prompt.data_source, config.default)
    try:
        value = REWARDS.get(name)(response, prompt.ground_truth)
    except Exception as error:
        error.add_note(f"while reward {name} scored a response to prompt {prompt.id} (row {prompt.index})")
        raise
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"reward {name} gave {value!r} for prompt {prompt.id} (row {prompt.index}); it must give a finite number")
    return float(value)

"""Whether ground truths can be graded: each is given as the answer to the reward that will grade it."""

from collections.abc import Sequence

import numpy as np

from engine.config import RewardConfig
from engine.config.reward import RegexConfig
from engine.prompts import Prompt
from engine.rewards.answers import END_OF_THINKING
from engine.rewards.scoring import Scored, Scoring

FORMS = (r"\boxed{{{}}}", "{}", "Answer: {}", "#### {}", rf"<think>{END_OF_THINKING}\boxed{{{{{{}}}}}}")
"""Ways to give an answer; one that earns something is enough. The last is for rewards that ask for a thinking that ends."""
COMPARING = {"math_verify", "exact_match", "multiple_choice"}
"""Rewards that find the ground truth in a response, so that giving it has to earn something. Of one's own functions nobody knows that."""


def graded(asked: Sequence[tuple[Sequence[Prompt], Sequence[RewardConfig]]], limit: int) -> list[list[str | None]]:
    """For each prompt what its ground truth earns from the rewards beside it: `right`, or `refused` (a reward fails), or `earns nothing`; None where
    it was not tried, or is not what the reward looks for.

    At most `limit` different ground truths of each sequence are tried, spread evenly. A reward is loaded once, however often it stands there.

    Raises:
        RewardError: a reward cannot be loaded.
    """
    configs = {reward.digest(): reward for _, rewards in asked for reward in rewards}
    tried: dict[str, dict[tuple[str, str], Prompt]] = {digest: {} for digest in configs}
    for prompts, rewards in asked:
        different = _spread({_key(prompt): prompt for prompt in reversed(prompts)}, limit)
        for reward in rewards:
            tried[reward.digest()] |= different
    found: dict[tuple[str, tuple[str, str]], str | None] = {}
    for digest, prompts_by_key in tried.items():
        with Scoring(configs[digest]) as scoring:
            verdicts = _grade(scoring, list(prompts_by_key.values()))
        found |= {(digest, key): verdict for key, verdict in zip(prompts_by_key, verdicts, strict=True)}
    return [[_worst([found.get((reward.digest(), _key(prompt))) for reward in rewards]) for prompt in prompts] for prompts, rewards in asked]


def _key(prompt: Prompt) -> tuple[str, str]:
    return prompt.data_source, prompt.ground_truth


def _spread(prompts: dict[tuple[str, str], Prompt], limit: int) -> dict[tuple[str, str], Prompt]:
    keys = sorted(prompts)
    chosen = keys if len(keys) <= limit else [keys[i] for i in np.linspace(0, len(keys) - 1, limit).round().astype(int)]
    return {key: prompts[key] for key in chosen}


def _worst(verdicts: Sequence[str | None]) -> str | None:
    told = [verdict for verdict in verdicts if verdict is not None]
    return next((verdict for verdict in told if verdict != "right"), told[0] if told else None)


def _grade(scoring: Scoring, prompts: Sequence[Prompt]) -> list[str | None]:
    best: list[Scored | None] = [None] * len(prompts)
    for form in FORMS:
        open_ = [i for i, scored in enumerate(best) if scored is None or scored.status != "ok" or scored.outcome <= 0]
        pending = {i: scoring.begin(prompts[i], form.format(prompts[i].ground_truth), 1, finished=True) for i in open_}
        for i, one in pending.items():
            scored, before = scoring.result(one), best[i]
            if before is None or before.status != "ok" or scored.outcome > before.outcome:
                best[i] = scored
    return [_verdict(scored, _compares(scoring.config, prompt)) for scored, prompt in zip(best, prompts, strict=True)]


def _verdict(scored: Scored | None, compares: bool) -> str | None:
    assert scored is not None
    if scored.status != "ok":
        return "refused"
    if scored.outcome > 0:
        return "right"
    return "earns nothing" if compares else None


def _compares(config: RewardConfig, prompt: Prompt) -> bool:
    parts = config.of(prompt.data_source).values()
    return any(part.function in COMPARING or (isinstance(part, RegexConfig) and part.equals_ground_truth) for part in parts)

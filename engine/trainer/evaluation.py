"""Greedy and sampled accuracy of the policy on held-out prompts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import EvaluationConfig, RewardConfig
from engine.events import Emit, EvaluationProgressed
from engine.prompts import Prompt, sample_seed
from engine.rewards.scoring import score
from engine.trainer.samples import sample_requests, sample_rows
from engine.trainer.session import Session

CHUNKS = 4
"""Parts that an evaluation is generated in, so that its progress can be seen."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of one model on one set of prompts."""

    label: str
    prompt_ids: list[str]
    difficulties: list[str]
    greedy: list[float]
    """Score of the greedy response, by prompt."""
    samples: list[list[float]]
    """Scores of the drawn responses, [prompts][samples_per_prompt]."""
    rows: list[dict[str, Any]]
    """Every response, as in `SamplesGenerated`; the greedy one of a prompt first."""
    seconds: float
    tokens: int
    """Response tokens generated."""


def evaluate(
    session: Session, label: str, config: EvaluationConfig, reward: RewardConfig, prompts: Sequence[Prompt], seed: int, emit: Emit
) -> Evaluation:
    """Generates one greedy and `samples_per_prompt` drawn responses to every prompt, and scores them.

    Seeds depend on (seed, prompt, sample) and not on `label`: two evaluations of one model are equal, and before and after are
    compared under common random numbers.
    """
    started = time.perf_counter()
    chosen = list(prompts[: config.max_prompts])
    per_prompt = 1 + config.samples_per_prompt
    scores: list[float] = []
    rows: list[dict[str, Any]] = []
    size = -(-len(chosen) // CHUNKS)
    for start in range(0, len(chosen), size):
        repeated = [prompt for prompt in chosen[start : start + size] for _ in range(per_prompt)]
        seeds = [sample_seed(seed, "evaluation", 0, prompt.id, index % per_prompt) for index, prompt in enumerate(repeated)]
        samplings = [None if index % per_prompt == 0 else config.sampling for index in range(len(repeated))]
        requests = sample_requests(session.tokenizer, repeated, seeds, samplings, config.max_response_tokens)
        samples = session.actor.generate(requests).get()
        part = score(reward.model_copy(update={"shuffle": False}), samples.objects["response"], repeated)
        ids = [f"{label}/{prompt.id}/{_kind(index, per_prompt)}" for index, prompt in enumerate(repeated)]
        rows += sample_rows(ids, repeated, samples, part)
        scores += part
        emit(EvaluationProgressed(label=label, done=len(scores), total=len(chosen) * per_prompt))
    by_prompt = [scores[start : start + per_prompt] for start in range(0, len(scores), per_prompt)]
    return Evaluation(
        label=label,
        prompt_ids=[prompt.id for prompt in chosen],
        difficulties=[prompt.difficulty for prompt in chosen],
        greedy=[of_prompt[0] for of_prompt in by_prompt],
        samples=[of_prompt[1:] for of_prompt in by_prompt],
        rows=rows,
        seconds=time.perf_counter() - started,
        tokens=sum(row["response_tokens"] for row in rows),
    )


def _kind(index: int, per_prompt: int) -> str:
    position = index % per_prompt
    return "greedy" if position == 0 else str(position - 1)

"""Greedy and sampled accuracy of the policy on held-out prompts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import EvaluationConfig, RewardConfig
from engine.events import Emit, EvaluationProgressed
from engine.prompts import Prompt
from engine.rollout.plan import SamplePlan
from engine.trainer.samples import sample_rows, scored
from engine.trainer.session import Session

PROMPT_SET = "evaluation"
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
    names = {0: "greedy", **{number: str(number - 1) for number in range(1, per_prompt)}}
    session.load_prompts(PROMPT_SET, chosen)
    session.reward.use(reward.model_copy(update={"shuffle": False})).get()
    rows: list[dict[str, Any]] = []
    size = -(-len(chosen) // CHUNKS)
    for start in range(0, len(chosen), size):
        positions = tuple(range(start, min(start + size, len(chosen))))
        # The stage and step of the seeds are fixed: they must not depend on when an evaluation is made.
        drawn = (positions, per_prompt, config.sampling, config.max_response_tokens)
        plan = SamplePlan(PROMPT_SET, *drawn, seed, PROMPT_SET, 0, greedy_first=True, length_extension=config.length_extension)
        rows += sample_rows(label, scored(session, plan), chosen, names)
        emit(EvaluationProgressed(label=label, done=len(rows), total=len(chosen) * per_prompt))
    scores = [row["reward"] for row in rows]
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

"""Samples on their way home: scored, and as rows for people; the same wherever the policy is asked."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.batch import Batch
from engine.control.future import join
from engine.prompts import Prompt
from engine.rollout.plan import SamplePlan
from engine.trainer.session import Session


def scored(session: Session, plan: SamplePlan) -> Batch:
    """The plan's samples with the columns of `RewardWorker.combine`, fetched. The session's reward has been told how to score."""
    samples = session.actor.generate(plan)
    return join(samples, session.reward.combine(session.reward.score(samples), {}, None)).get()


def sample_rows(prefix: str, samples: Batch, prompts: Sequence[Prompt], names: Mapping[int, str] | None = None) -> list[dict[str, Any]]:
    """Rows of `SamplesGenerated`, one a sample.

    Args:
        prefix: of the sample ids, which are PREFIX/PROMPT/NUMBER.
        samples: a rollout with the columns of `RewardWorker.combine`.
        prompts: what the column `prompt` points into.
        names: what sample numbers are called instead.
    """
    columns = {name: samples.tensors[name].tolist() for name in ("prompt", "sample", "reward", "response_tokens", "finished")}
    parts = dict.fromkeys(name for found in samples.objects["reward_parts"] for name in found)
    rows = []
    for row, response in enumerate(samples.objects["response"]):
        prompt, number = prompts[columns["prompt"][row]], columns["sample"][row]
        rows.append(
            {
                "sample_id": f"{prefix}/{prompt.id}/{number if names is None else names[number]}",
                "difficulty": prompt.difficulty,
                "prompt": prompt.messages[-1]["content"],
                "response": response,
                "ground_truth": prompt.ground_truth,
                "reward": columns["reward"][row],
                "reward_status": samples.objects["reward_status"][row],
                "reward_reason": samples.objects["reward_reason"][row],
                # The same keys in every row, which a table has to have: null where a sample has no such part.
                **{f"reward/{name}": samples.objects["reward_parts"][row].get(name) for name in parts},
                "response_tokens": columns["response_tokens"][row],
                "finished": columns["finished"][row],
            }
        )
    return rows

"""Groups without signal, rescue and truncated answers in the whole loop, on two ranks."""

import pickle
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from probe import restore, weights
from toy import prompt

from engine.batch import concat
from engine.config import OptimizerConfig, RewardConfig, RLStageConfig, StageTrainingConfig
from engine.events import PromptsScored, SamplesGenerated, StepFinished, StepTraced, WeightsSynchronised
from engine.prompts import Prompt
from engine.trainer.generation import NoSignalError
from engine.trainer.replay import kept_operations, replay, step_directory
from engine.trainer.session import Session
from engine.trainer.sync import train_rl

# Answers 1 and 2 come by the toss of a coin; 3 never does.
PROMPTS = [prompt(f"{a}+{b}", index=4 * a + b, answer=str(1 + (a + b) % 3)) for a in range(4) for b in range(4)]
STAGE: dict[str, Any] = {
    "kind": "rl",
    "steps": 1,
    "prompts_per_step": 4,
    "samples_per_prompt": 3,
    "max_prompt_tokens": 32,
    "max_response_tokens": 8,
    "reward": RewardConfig(default="exact_match"),
    "samples_table_every_steps": 1,
}


NEVER = [asked for asked in PROMPTS if asked.ground_truth == "3"]


def config(learning_rate: float = 1e-2, **settings: Any) -> RLStageConfig:
    optimizer = OptimizerConfig(learning_rate=learning_rate, weight_decay=0.1)
    training = StageTrainingConfig(optimizer=optimizer, max_tokens_per_micro_batch=64)
    return RLStageConfig.model_validate({**STAGE, "training": training, **settings})


def run(session: Session, prompts: Sequence[Prompt] = PROMPTS, stage: str = "rl", **settings: Any) -> list[Any]:
    """Events of a stage from the taught weights on."""
    events: list[Any] = []
    session.actor.apply(restore).get()
    session.actor.synchronise().get()
    train_rl(session, stage, config(**settings), prompts, 0, events.append)
    # Every prompt that was asked, as it was drawn, whatever is made of it afterwards. Mutations: after the rescue; what is trained on; masked answers
    # left out; nothing where a step makes no update.
    assert scored(events) == [{asked: mean_and_count(group) for asked, group in groups.items()} for groups in drawn(events)]
    return events


def scored(events: list[Any]) -> list[dict[str, tuple[float, int]]]:
    """What each step says of its prompts: mean outcome, and of how many samples."""
    told = [event for event in events if isinstance(event, PromptsScored)]
    assert [event.step for event in told] == list(range(1, len(told) + 1))
    return [dict(zip(event.prompts, zip(event.outcomes, event.samples, strict=True), strict=True)) for event in told]


def mean_and_count(group: list[dict[str, Any]]) -> tuple[float, int]:
    return sum(row["reward"] for row in group) / len(group), len(group)


def metrics(events: list[Any]) -> list[dict[str, float]]:
    return [event.metrics for event in events if isinstance(event, StepFinished)]


def drawn(events: list[Any]) -> list[dict[str, list[dict[str, Any]]]]:
    """The samples of each step by prompt, in the order in which prompts were asked."""
    tables = []
    for event in events:
        if isinstance(event, SamplesGenerated):
            by_prompt = defaultdict(list)
            for row in event.rows:
                by_prompt[row["sample_id"].split("/")[2]].append(row)
            tables.append(dict(by_prompt))
    return tables


def with_signal(group: list[dict[str, Any]]) -> bool:
    return len({row["reward"] for row in group}) > 1


def test_filter_asks_until_it_has_enough_or_may_not(session: Session) -> None:
    settings = {"groups": {"kind": "filter", "max_generations": 2}, "steps": 3, "prompts_per_step": 6, "learning_rate": 1e-3}
    events = run(session, **settings)
    for found, groups in zip(metrics(events), drawn(events), strict=True):
        signals = [with_signal(group) for group in groups.values()]
        # Mutations: filter by the number of groups instead of those with signal; ask the same prompts again.
        assert len(groups) == 6 * found["data/generations"]
        assert found["data/generations"] == (1 if sum(signals[:6]) == 6 else 2)
        assert found["data/filtered_groups"] == signals.count(False)
        assert found["data/surplus_groups"] == max(0, sum(signals) - 6)
        assert found["policy/max_log_prob_difference"] <= 1e-4
        # Metrics are of all that was drawn.
        rewards = [row["reward"] for group in groups.values() for row in group]
        assert found["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert found["data/zero_signal_groups"] == signals.count(False)
    assert any(found["data/generations"] > 1 for found in metrics(events))
    # To the last bit, and with every generation in the trace.
    moved = weights(session)
    again = run(session, **settings)
    assert drawn(again) == drawn(events)
    assert all(torch.equal(moved[name], tensor) for name, tensor in weights(session).items())
    generations = [sum(one.operator == "generate" for one in event.trace.operations) for event in events if isinstance(event, StepTraced)]
    assert generations == [found["data/generations"] for found in metrics(events)]
    with pytest.raises(NoSignalError, match=r"stage rl, step 1: 0 of prompts_per_step=4 groups have signal after 2 generations .*, of 5 prompts"):
        run(session, NEVER, groups={"kind": "filter", "max_generations": 3, "when_spent": "stop"})


def test_dropped_groups_are_in_no_denominator(session: Session) -> None:
    # Groups of three of which some go: a number of rows that two ranks cannot divide evenly, too.
    settings: dict[str, Any] = {"prompts_per_step": 14, "learning_rate": 1e-2}
    kept, dropped = run(session, **settings), run(session, groups={"kind": "drop"}, **settings)
    assert drawn(kept) == drawn(dropped)
    groups = drawn(kept)[0].values()
    tokens = sum(row["response_tokens"] for group in groups for row in group)
    left = sum(row["response_tokens"] for group in groups if with_signal(group) for row in group)
    assert metrics(dropped)[0]["data/dropped_groups"] == sum(not with_signal(group) for group in groups) > 0
    # What is dropped had no gradient; the rest is divided by fewer tokens. Mutations: denominators of all rows, or of each rank's own.
    expected = metrics(kept)[0]["policy/gradient_norm"] * tokens / left
    assert metrics(dropped)[0]["policy/gradient_norm"] == pytest.approx(expected, rel=1e-4)
    assert left < tokens


def test_substitutes_are_trained_on_and_not_measured(session: Session) -> None:
    settings: dict[str, Any] = {"stage": "substituted", "prompts_per_step": 8, "samples_per_prompt": 4}
    kept = run(session, **settings)
    substituted = run(session, groups={"kind": "substitute", "least_fraction": 0.1}, keep_calls_every_steps=1, **settings)
    (before,), (after,) = metrics(kept), metrics(substituted)
    groups = drawn(kept)[0].values()
    assert drawn(substituted) == drawn(kept)
    assert after["data/substituted_groups"] == sum(not with_signal(group) for group in groups) > 0
    for name in ("reward/mean", "reward/std", "response/tokens_mean", "data/zero_signal_groups"):
        assert after[name] == before[name]
    # As many groups, each with a gradient. Mutations: substitutes that are not trained on; groups that are left out instead.
    (operation,) = [one for one in kept_operations(step_directory(session.directory, "substituted", 1)) if one.operator == "advantage"]
    advantages = concat([pickle.loads(file.read_bytes()).result for file in operation.files]).tensors["advantages"]
    assert advantages.any(dim=1).tolist() == [True] * 8 * 4
    assert after["policy/gradient_norm"] > before["policy/gradient_norm"]


@pytest.mark.parametrize("kind", ["drop", "substitute", "filter"])
def test_a_step_without_signal_makes_no_update(session: Session, kind: str) -> None:
    before = weights(session)
    events = run(session, NEVER, groups={"kind": kind}, steps=2)
    # Mutation: train on all rows then. Their gradient is 0, and Adam's weight decay moves the weights all the same.
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(session).items())
    assert not [event for event in events if isinstance(event, WeightsSynchronised)]
    for found in metrics(events):
        assert found["data/skipped_updates"] == 1
        assert found["reward/mean"] == 0
        assert "policy/loss" not in found


def test_rescue_puts_old_right_responses_in(session: Session) -> None:
    # Of two samples both are wrong every fourth time. The weights move, so that a remembered response is not the policy's own any more.
    settings = {"rescue": {"responses_per_prompt": 2}, "steps": 8, "prompts_per_step": 8, "samples_per_prompt": 2, "keep_calls_every_steps": 1}
    events = run(session, stage="rescued", learning_rate=5e-3, **settings)
    right: set[str] = set()
    for found, groups in zip(metrics(events), drawn(events), strict=True):
        helpless = [prompt for prompt, group in groups.items() if not any(row["reward"] for row in group)]
        # Mutations: help for groups that have a right response; a memory that forgets.
        assert found["data/rescued_groups"] == len(right & set(helpless))
        # Mutation: compare rescued responses with the rollout engine too.
        assert found["policy/max_log_prob_difference"] <= 1e-4
        rewards = [row["reward"] for group in groups.values() for row in group]
        assert found["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
        right |= {prompt for prompt, group in groups.items() if any(row["reward"] for row in group)}
    rescues = [step for step, found in enumerate(metrics(events), start=1) if found["data/rescued_groups"]]
    assert rescues
    assert metrics(events)[rescues[-1] - 1]["data/rescued_age_versions"] >= 1
    # The memory is part of a step's beginning. Mutation: leave it out of `own_state`.
    directory = step_directory(session.directory, "rescued", rescues[-1])
    session.begin_stage(config(**settings))
    (operation,) = [one for one in kept_operations(directory) if one.operator == "rescue"]
    compared = replay(session, directory, operation)
    assert {difference.column for difference in compared} >= {"rescued", "input_ids", "rollout_log_probs"}
    assert not any(difference.largest for difference in compared)


@pytest.mark.parametrize("kind", ["mask_before", "mask_after"])
def test_masked_answers_teach_nothing(session: Session, kind: str) -> None:
    before = weights(session)
    # Two tokens are enough for no answer.
    (found,) = metrics(run(session, truncated={"kind": kind}, max_response_tokens=2, updates_per_step=2))
    assert found["response/truncated_fraction"] == 1
    assert found["policy/empty_updates"] == 2
    # Mutation: only their advantages taken away: weight decay moves the weights.
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(session).items())


def test_length_costs_reward(session: Session) -> None:
    events = run(session, truncated={"kind": "penalty", "buffer_tokens": 6, "weight": 0.5})
    lengths = [row["response_tokens"] for group in drawn(events)[0].values() for row in group]
    expected = sum(-0.5 * min(1, max(0, (length - 2) / 6)) for length in lengths) / len(lengths)
    assert metrics(events)[0]["reward/overlong_penalty_mean"] == pytest.approx(expected, abs=1e-6)
    assert expected < 0

"""Truncated answers: what estimators see of them, what losses count of them, and what length costs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import engine.workers.base as base
from engine.algorithms.overlong import overlong_penalty
from engine.algorithms.step import step_advantages
from engine.algorithms.truncation import after_statistics, before_statistics, penalties, valid
from engine.batch import Batch
from engine.config import (
    AlgorithmConfig,
    KeepTruncated,
    MaskAfterStatistics,
    MaskBeforeStatistics,
    OptimizerConfig,
    OverlongPenalty,
    RLStageConfig,
    StageTrainingConfig,
    TruncatedConfig,
)
from engine.metrics import Statistics, Sum

CAP = 4
LENGTHS = torch.tensor([2, 3, CAP, 1])
STEP = Batch(
    {
        "response_mask": torch.arange(CAP) < LENGTHS[:, None],
        "prompt": torch.zeros(4, dtype=torch.int64),
        "reward": torch.tensor([1.0, 0.0, 0.0, 1.0]),
        "response_tokens": LENGTHS,
        "finished": torch.tensor([True, True, False, True]),
    }
)
GRPO = 0.8660239  # Of rewards 1, 0, 0, 1 (reference/numerics): the deviation is sqrt(1/3).


def advantages(config: TruncatedConfig, step: Batch = STEP) -> Batch:
    found = step_advantages(before_statistics(step, config, CAP), AlgorithmConfig())
    return after_statistics(found, step, config)


def counted(found: Batch, step: Batch = STEP) -> list[int]:
    """Tokens of each sample that losses count."""
    return found.tensors.get("loss_mask", step.tensors["response_mask"]).sum(dim=1).tolist()


def by_sample(found: Batch) -> list[float]:
    return found.tensors["advantages"][:, 0].tolist()


def test_kept_as_what_its_reward_says() -> None:
    found = advantages(KeepTruncated())
    assert by_sample(found) == pytest.approx([GRPO, -GRPO, -GRPO, GRPO], abs=1e-6)
    assert counted(found) == LENGTHS.tolist()


def test_masked_before_the_statistics_it_leaves_its_group() -> None:
    # Of rewards 1, 0, 1: mean 2/3, deviation sqrt(1/3). Mutation: take the mask after the statistics; the others would have +-0.866.
    found = advantages(MaskBeforeStatistics(kind="mask_before"))
    assert by_sample(found) == pytest.approx([(1 / 3) / (1 / 3) ** 0.5, -(2 / 3) / (1 / 3) ** 0.5, 0, (1 / 3) / (1 / 3) ** 0.5], abs=1e-5)
    assert counted(found) == [2, 3, 0, 1]
    assert valid(STEP, MaskBeforeStatistics(kind="mask_before")).tolist() == [True, True, False, True]


def test_masked_after_the_statistics_it_still_counts_in_the_mean() -> None:
    # Mutations: mask before the statistics; or leave the mask as it was, and the truncated sample has a loss.
    found = advantages(MaskAfterStatistics(kind="mask_after"))
    assert by_sample(found)[:2] == pytest.approx([GRPO, -GRPO], abs=1e-6)
    assert counted(found) == [2, 3, 0, 1]
    assert valid(STEP, MaskAfterStatistics(kind="mask_after")).all()


def test_the_penalty_is_in_the_reward_before_the_statistics() -> None:
    # A slope over the last 2 of 4 tokens: lengths 2, 3, 4, 1 cost 0, 1/2, 1, 0, here doubled. Rewards are then 1, -1, -2, 1.
    found = advantages(OverlongPenalty(kind="penalty", buffer_tokens=2, weight=2.0))
    expected = torch.tensor([1.0, -1.0, -2.0, 1.0])
    expected = (expected - expected.mean()) / expected.std()
    # Mutations: no weight; the slope measured from the cap.
    torch.testing.assert_close(found.tensors["advantages"][:, 0], expected, atol=1e-5, rtol=0)
    assert counted(found) == LENGTHS.tolist()


def test_what_was_taken_out_before_stays_out() -> None:
    # Of samples that something else took out, such as a reward that failed. Mutation: `kept` made anew from `finished`.
    step = STEP.with_tensors(kept=torch.tensor([False, True, True, True]))
    modes: list[tuple[TruncatedConfig, list[int], list[bool]]] = [
        (KeepTruncated(), [0, 3, CAP, 1], [False, True, True, True]),
        (MaskBeforeStatistics(kind="mask_before"), [0, 3, 0, 1], [False, True, False, True]),
        (MaskAfterStatistics(kind="mask_after"), [0, 3, 0, 1], [False, True, True, True]),
    ]
    for config, tokens, judged in modes:
        found = advantages(config, step)
        assert counted(found, step) == tokens
        assert valid(step, config).tolist() == judged
        assert by_sample(found)[0] == 0


# DAPO, equation 13, with L_max = 10 and L_cache = 4: 0 up to 6, (6 - length) / 4 up to 10, then -1.
@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (6, 0), (7, -0.25), (9, -0.75), (10, -1), (11, -1)])
def test_golden_values_of_the_slope(tokens: int, expected: float) -> None:
    assert overlong_penalty(tokens, 10, 4) == expected


@given(st.integers(0, 50), st.integers(1, 40), st.integers(1, 40), st.floats(0.1, 10))
def test_longer_is_never_cheaper(tokens: int, max_tokens: int, buffer_tokens: int, weight: float) -> None:
    config = OverlongPenalty(kind="penalty", buffer_tokens=buffer_tokens, weight=weight)
    short, long = penalties(torch.tensor([tokens, tokens + 1]), config, max_tokens).tolist()
    assert -weight * (1 + 1e-6) <= long <= short <= 0


def test_a_mini_batch_without_tokens_makes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation: step all the same, and momentum and decay move the weights without anything learnt.
    monkeypatch.setattr(base.dist, "all_reduce", lambda *_, **__: None)
    steps: list[float] = []

    class Trainer:
        data_group = None

        def optimizer_step(self, passes: list[Batch], term: Any) -> Any:
            steps.append(sum(term(part) for part in passes))
            return SimpleNamespace(gradient_norm=1.0, learning_rate=1.0, consecutive_skips=0)

    worker: Any = object.__new__(base.TrainedWorker)
    worker.prefix, worker.training, worker.config = "policy", Trainer(), SimpleNamespace(training=SimpleNamespace(pack_sequences=True))

    def share(part: Batch, denominators: Any, statistics: Statistics) -> float:
        statistics.add("policy/loss", Sum(1.0))
        return float(denominators.tokens)

    stage = RLStageConfig(
        kind="rl",
        steps=1,
        prompts_per_step=2,
        updates_per_step=2,
        max_prompt_tokens=1,
        max_response_tokens=CAP,
        training=StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-3)),
    )
    columns = Batch({"attention_mask": torch.ones(4, CAP, dtype=torch.bool), "response_mask": STEP.tensors["response_mask"].clone()})
    columns.tensors["response_mask"][2:] = False
    found = worker.updates(columns, stage, share).result()
    assert steps == [5.0]
    assert found["policy/empty_updates"] == 1
    assert found["policy/loss"] == 0.5
    columns.tensors["response_mask"][:] = False
    found = worker.updates(columns, stage, share).result()
    assert (len(steps), found["policy/empty_updates"], found["policy/loss"]) == (1, 2, 0)

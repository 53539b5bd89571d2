"""The RL loop and the evaluation as a whole, on real engines."""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from probe import die_at_the_next_update, open_probed, process_ids, restore, weights
from toy import prompt

from engine.algorithms.registry import ADVANTAGES, LOSSES
from engine.config import (
    AlgorithmConfig,
    CriticConfig,
    EngineConfig,
    EvaluationConfig,
    GAEAdvantageConfig,
    OptimizerConfig,
    RewardConfig,
    RLStageConfig,
    SamplingConfig,
    StageTrainingConfig,
)
from engine.control.deadline import WorkerError
from engine.events import (
    EvaluationProgressed,
    PromptsScored,
    SamplesGenerated,
    StageFinished,
    StageStarted,
    StepFinished,
    StepTraced,
    WeightsSynchronised,
)
from engine.prompts import PromptSampler
from engine.trainer.evaluation import Evaluation, evaluate
from engine.trainer.session import Session
from engine.trainer.sync import train_rl

# Answers 1 and 2 come by the toss of a coin; 3 never does.
PROMPTS = [prompt(f"{a}+{b}", index=3 * a + b, answer=str(1 + (a + b) % 3)) for a, b in itertools.product(range(3), range(3))]
REWARD = RewardConfig(default="exact_match")
ROW = {"sample_id", "difficulty", "prompt", "response", "ground_truth", "reward", "response_tokens", "finished"}
ROW |= {"reward_status", "reward_reason", "reward/exact_match"}
SECONDS = re.compile(r"(timing|throughput|memory)/|sync/(.*seconds|proof_|bytes_proof)")


def config(learning_rate: float = 1e-3, **changes: Any) -> RLStageConfig:
    return RLStageConfig(
        kind="rl",
        **{
            "steps": 3,
            "prompts_per_step": 6,
            "samples_per_prompt": 4,
            "updates_per_step": 2,
            "max_prompt_tokens": 32,
            "max_response_tokens": 8,
            "reward": REWARD,
            "training": StageTrainingConfig(
                optimizer=OptimizerConfig(learning_rate=learning_rate, weight_decay=0.1, warmup_steps=1), max_tokens_per_micro_batch=64
            ),
            "samples_table_every_steps": 1,
            **changes,
        },
    )


def run(session: Session, config: RLStageConfig, seed: int = 0) -> list[Any]:
    """Events of a stage from the taught weights on."""
    events: list[Any] = []
    session.actor.apply(restore).get()
    session.actor.synchronise().get()
    train_rl(session, "rl", config, PROMPTS, seed, events.append)
    return events


def of(kind: type, events: Sequence[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def samples(events: Sequence[Any]) -> list[dict[str, Any]]:
    return [row for event in of(SamplesGenerated, events) for row in event.rows]


def reproducible(events: Sequence[Any]) -> list[dict[str, float]]:
    """Metrics by step, without those that a clock or the operating system makes."""
    return [{name: value for name, value in event.metrics.items() if not SECONDS.match(name)} for event in of(StepFinished, events)]


@pytest.fixture(scope="module")
def first_run(_taught: Session) -> tuple[list[Any], dict[str, torch.Tensor]]:
    events = run(_taught, config())
    return events, weights(_taught)


@pytest.fixture
def events(first_run: tuple[list[Any], dict[str, torch.Tensor]]) -> list[Any]:
    return first_run[0]


def test_events_in_order(events: list[Any]) -> None:
    step = [PromptsScored, WeightsSynchronised, StepTraced, SamplesGenerated, StepFinished]
    assert [type(event) for event in events] == [StageStarted, *step * 3, StageFinished]
    assert [event.step for event in of(StepFinished, events)] == [1, 2, 3]
    versions = [event.version for event in of(WeightsSynchronised, events)]
    assert versions == list(range(versions[0], versions[0] + 3))


def test_samples(events: list[Any]) -> None:
    sampler = PromptSampler(PROMPTS, 6, 0)
    expected = [f"rl/{step}/{chosen.id}/{k}" for step in (1, 2, 3) for chosen in sampler.step(step) for k in range(4)]
    rows = samples(events)
    assert [row["sample_id"] for row in rows] == expected
    assert all(set(row) == ROW for row in rows)
    by_id = {chosen.id: chosen for chosen in PROMPTS}
    for row in rows:
        asked = by_id[row["sample_id"].split("/")[2]]
        assert row["prompt"] == asked.messages[-1]["content"]
        assert row["reward"] == float(row["response"] == f"\\boxed{{{asked.ground_truth}}}")
    assert {row["reward"] for row in rows} == {0.0, 1.0}


def test_metrics(events: list[Any]) -> None:
    for event, table in zip(of(StepFinished, events), of(SamplesGenerated, events), strict=True):
        metrics, rewards = event.metrics, torch.tensor([row["reward"] for row in table.rows])
        assert {
            *(f"reward/{name}" for name in ("mean", "std")),
            *(f"policy/{name}" for name in ("entropy", "loss", "gradient_norm", "clip_fraction_low", "clip_fraction_high", "learning_rate")),
            *(f"policy/{name}" for name in ("kl_rollout", "max_log_prob_difference")),
            *(f"response/{name}" for name in ("tokens_mean", "truncated_fraction")),
            *(f"timing/{name}_seconds" for name in ("generate", "reward", "log_prob", "update", "synchronise", "step")),
            "data/zero_signal_groups",
            "throughput/tokens_per_second",
            *(f"sync/bytes_{name}" for name in ("received", "sent", "minimum", "kept", "proof")),
            *(f"sync/{name}_seconds" for name in ("transfer", "load", "pack", "proof", "wait")),
            "sync/peak_extra_bytes",
            "sync/proof_coverage",
            "sync/seconds",
            "memory/peak_gb",
        } <= set(metrics)
        assert metrics["reward/mean"] == pytest.approx(rewards.mean().item())
        assert metrics["reward/std"] == pytest.approx(rewards.std().item())
        assert metrics["response/tokens_mean"] == pytest.approx(sum(row["response_tokens"] for row in table.rows) / len(table.rows))
        assert metrics["response/truncated_fraction"] == pytest.approx(sum(not row["finished"] for row in table.rows) / len(table.rows))
        assert metrics["policy/max_log_prob_difference"] <= 1e-4
        # A policy that says 1 or 2 with equal chance has ln 2 = 0.69 nats for the digit, spread over all four tokens of an answer.
        assert 0.05 < metrics["policy/entropy"] < 0.7
        groups = rewards.view(-1, 4)
        # Mutation: count samples instead of groups, or groups of zeros only.
        assert metrics["data/zero_signal_groups"] == sum(len(set(group.tolist())) == 1 for group in groups)
        assert metrics["data/zero_signal_groups"] >= sum(row["ground_truth"] == "3" for row in table.rows) / 4 > 0


SELECTED = 0.3
OF_ITS_OWN = {
    "clip_cov": {"fraction": SELECTED, "covariance_low": -1e9, "covariance_high": 1e9},
    "kl_cov": {"fraction": SELECTED},
}


@pytest.mark.parametrize("name", LOSSES.names())
def test_every_loss_trains(session: Session, events: list[Any], name: str) -> None:
    # Mutations: leave `selected` out of the columns of `actor.update`, or out of what a pass is given.
    found = run(session, config(steps=1, algorithm=AlgorithmConfig(loss={"name": name, **OF_ITS_OWN.get(name, {})})))
    (metrics,) = reproducible(found)
    assert samples(found) == samples(events)[:24]
    assert metrics["policy/gradient_norm"] > 0
    if name in OF_ITS_OWN:
        tokens = sum(row["response_tokens"] for row in samples(found))
        share = {"clip_cov": "policy/clip_fraction_covariance", "kl_cov": "policy/kl_covariance_fraction"}[name]
        # All that was selected of the step arrived, once, over two ranks, two updates and their passes.
        assert metrics[share] == pytest.approx(int(SELECTED * tokens) / tokens)


@pytest.mark.parametrize(
    "advantage",
    [*({"estimator": name} for name in ADVANTAGES.names() if name not in ("grpo", "gae")), {"scale": "batch"}, {"scale": "minibatch"}],
    ids=str,
)
def test_every_estimator_trains(session: Session, events: list[Any], advantage: dict[str, str]) -> None:
    # Mutation: an estimator whose columns nobody computes, or whose configuration does not survive the way to the workers.
    found = run(session, config(steps=1, algorithm=AlgorithmConfig(advantage=advantage)))
    (metrics,), (plain, *_) = reproducible(found), reproducible(events)
    assert samples(found) == samples(events)[:24]
    # Of rewards of 0 and 1, the best of a group is ahead of the second where it alone is right.
    right = torch.tensor([row["reward"] for row in samples(found)]).view(-1, 4).sum(dim=1)
    assert (metrics["policy/gradient_norm"] > 0) == (bool(right.eq(1).any()) or advantage.get("estimator") != "grpo_pass_k")
    assert metrics["policy/gradient_norm"] != plain["policy/gradient_norm"]


def test_the_policy_follows_the_reward(session: Session) -> None:
    # Every prompt is asked at every step, and 1 is always right. Mutation: the sign of the loss.
    always_one = [prompt(f"{a}+{a}", index=a) for a in range(6)]
    events: list[Any] = []
    train_rl(session, "rl", config(3e-3, steps=6), always_one, 0, events.append)
    rewards = [step.metrics["reward/mean"] for step in of(StepFinished, events)]
    assert rewards[0] < 0.8
    assert rewards[-1] > 0.95


def test_ppo_follows_it_as_well(engine_config: EngineConfig, start: Path, tmp_path: Path) -> None:
    # With a critic that knows nothing at first. Mutations: returns without the values; the critic never updated; its head not at zero.
    always_one = [prompt(f"{a}+{a}", index=a) for a in range(6)]
    # Once every answer is right, whitening would blow the critic's last errors up to advantages of 1.
    algorithm = AlgorithmConfig(
        advantage=GAEAdvantageConfig(estimator="gae", whiten=False),
        critic=CriticConfig(optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1)),
    )
    events: list[Any] = []
    with open_probed(engine_config.model_copy(update={"critic": True}), start, tmp_path) as session:
        train_rl(session, "rl", config(3e-3, steps=6, algorithm=algorithm), always_one, 0, events.append)
    steps = [step.metrics for step in of(StepFinished, events)]
    assert steps[0]["reward/mean"] < 0.8
    assert steps[-1]["reward/mean"] > 0.95
    # All answers are right now: a critic that still said 0 would have a loss of 1/2.
    assert steps[-1]["critic/loss"] < 0.4


def test_the_same_seed_gives_the_same_run(session: Session, first_run: tuple[list[Any], dict[str, torch.Tensor]]) -> None:
    # Not a bit may differ. Mutations: a seed that depends on time or process; an optimizer that outlives its stage; a prefix cache that does.
    events = run(session, config())
    assert samples(events) == samples(first_run[0])
    assert reproducible(events) == reproducible(first_run[0])
    assert all(torch.equal(first_run[1][name], tensor) for name, tensor in weights(session).items())
    another = run(session, config(steps=1), seed=1)
    assert [row["response"] for row in samples(another)] != [row["response"] for row in samples(events)[:24]]


def test_learning_rate_zero_changes_nothing(session: Session) -> None:
    before = weights(session)
    events = run(session, config(0.0))
    # Mutation: weight decay that does not go through the learning rate.
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(session).items())
    assert all(step["policy/gradient_norm"] > 0 for step in reproducible(events))


def test_shuffled_rewards_are_the_same_rewards(session: Session, events: list[Any]) -> None:
    shuffled = samples(run(session, config(steps=1, reward=REWARD.model_copy(update={"shuffle": True}))))
    plain = samples(events)[: len(shuffled)]
    assert [row["response"] for row in shuffled] == [row["response"] for row in plain]
    rewards, plain_rewards = ([row["reward"] for row in rows] for rows in (shuffled, plain))
    # Mutation: draw with replacement, or do not deal at all.
    assert Counter(rewards) == Counter(plain_rewards)
    assert rewards != plain_rewards


EVALUATION = EvaluationConfig(samples_per_prompt=3, max_response_tokens=8, sampling=SamplingConfig(temperature=0.8))


def evaluated(session: Session, label: str, progress: list[EvaluationProgressed], **changes: Any) -> Evaluation:
    reward = REWARD.model_copy(update={"shuffle": True})  # An evaluation scores what is there, whatever the control arm trains on.
    return evaluate(session, label, EVALUATION.model_copy(update=changes), reward, PROMPTS, 0, progress.append)


def test_evaluation(session: Session) -> None:
    progress: list[EvaluationProgressed] = []
    before, after = evaluated(session, "before", progress), evaluated(session, "after", [])
    # Mutation: `label` in the seed: two evaluations of one model would differ by luck.
    assert before.greedy == after.greedy
    assert before.samples == after.samples
    assert before.tokens == after.tokens == sum(row["response_tokens"] for row in before.rows)
    assert before.prompt_ids == [asked.id for asked in PROMPTS]
    assert before.difficulties == [asked.ground_truth for asked in PROMPTS]

    assert [row["sample_id"] for row in before.rows] == [f"before/{asked.id}/{kind}" for asked in PROMPTS for kind in ("greedy", 0, 1, 2)]
    assert all(set(row) == ROW for row in before.rows)
    by_prompt = defaultdict(list)
    for row in before.rows:
        assert row["reward"] == float(row["response"] == f"\\boxed{{{row['ground_truth']}}}")
        by_prompt[row["sample_id"].split("/")[1]].append(row["reward"])
    assert [by_prompt[asked.id] for asked in PROMPTS] == [[greedy, *drawn] for greedy, drawn in zip(before.greedy, before.samples, strict=True)]
    # The coin falls on both sides within some prompt.
    assert any(len(set(drawn)) == 2 for drawn in before.samples)

    done = [event.done for event in progress]
    assert done == sorted(done)
    assert (done[-1], {event.total for event in progress}) == (36, {36})


def test_evaluation_of_few_prompts(session: Session) -> None:
    whole, some = evaluated(session, "e", []), evaluated(session, "e", [], max_prompts=1, samples_per_prompt=1)
    assert (some.greedy, len(some.samples), len(some.rows)) == (whole.greedy[:1], 1, 2)


@pytest.fixture(scope="module")
def start(_taught: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    _taught.actor.apply(restore).get()
    return _taught.export(tmp_path_factory.mktemp("start") / "model")


def test_the_same_seed_in_fresh_processes(
    first_run: tuple[list[Any], dict[str, torch.Tensor]], engine_config: EngineConfig, start: Path, tmp_path: Path
) -> None:
    processes: list[int] = []

    def run_again_and_lose_a_rank() -> None:
        with open_probed(engine_config, start, tmp_path) as fresh:
            processes.extend(process_ids(fresh))
            events: list[Any] = []
            train_rl(fresh, "rl", config(), PROMPTS, 0, events.append)
            assert samples(events) == samples(first_run[0])
            assert reproducible(events) == reproducible(first_run[0])
            assert all(torch.equal(first_run[1][name], tensor) for name, tensor in weights(fresh).items())
            fresh.actor.apply(die_at_the_next_update, 1).get()
            train_rl(fresh, "rl", config(), PROMPTS, 0, events.append)

    with pytest.raises(WorkerError, match=r"^actor rank 1, update, step 1: the worker's process is gone"):
        run_again_and_lose_a_rank()
    # Mutation: `Session.open` without its `finally`: rank 0 waits for its peer.
    assert not psutil.wait_procs([psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)], timeout=60)[1]
    assert sorted(path.name for path in (tmp_path / "workers").iterdir()) == ["main_rank_0.log", "main_rank_1.log"]

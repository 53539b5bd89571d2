"""Where a role sits changes nothing that it computes: the same run, to the last bit, colocated, split and mixed; and what overlaps."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import CPUS
from probe import open_probed, tell_at_once, weights
from toy import CONVERSATIONS, SFT, prompt

from engine.config import (
    AlgorithmConfig,
    CriticConfig,
    EngineConfig,
    GAEAdvantageConfig,
    KLConfig,
    OptimizerConfig,
    ResourcesConfig,
    RewardConfig,
    RLStageConfig,
    StageTrainingConfig,
)
from engine.control.trace import Trace
from engine.events import SamplesGenerated, StepFinished, StepTraced
from engine.trainer.sft import train_sft
from engine.trainer.sync import train_rl

ROOT = Path(__file__).parents[2]
PLACEMENTS = ("colocated", "split", "mixed")
PROMPTS = [prompt(f"{a}+{b}", index=4 * a + b, answer=str(1 + (a + b) % 3)) for a in range(4) for b in range(4)]
SECONDS = re.compile(r"(timing|throughput|memory)/|sync/(.*seconds|proof_|bytes_proof)")

# Everything that there is: a critic, a reference in the reward, two mini-batches.
PPO = RLStageConfig(
    kind="rl",
    steps=2,
    prompts_per_step=8,
    samples_per_prompt=4,
    updates_per_step=2,
    max_prompt_tokens=32,
    max_response_tokens=8,
    algorithm=AlgorithmConfig(
        advantage=GAEAdvantageConfig(estimator="gae"),
        kl=KLConfig(coefficient=0.05, place="reward"),
        critic=CriticConfig(optimizer=OptimizerConfig(learning_rate=1e-2)),
    ),
    reward=RewardConfig(default="exact_match"),
    training=StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-3), max_tokens_per_micro_batch=128),
    samples_table_every_steps=1,
)


def shipped(placement: str) -> ResourcesConfig:
    """The file that users name, with a deadline for tests."""
    settings = yaml.safe_load((ROOT / "conf" / "resources" / f"{placement}.yaml").read_text())
    return ResourcesConfig.model_validate({**settings, "call_deadline_seconds": 300.0})


class Run:
    """One whole run on fresh workers: a little SFT, then PPO."""

    def __init__(self, config: EngineConfig, model_directory: Path, directory: Path) -> None:
        events: list[Any] = []
        with open_probed(config, model_directory, directory) as session:
            self.processes = {group.role: len(group.pool.hosts) for group in session.groups}
            self.pools = {group.role: group.pool.name for group in session.groups}
            train_sft(session, "teach", SFT.model_copy(update={"steps": 30}), CONVERSATIONS, seed=0, emit=lambda event: None)
            session.actor.apply(tell_at_once).get()
            train_rl(session, "rl", PPO, PROMPTS, 3, events.append)
            self.weights = weights(session)
        self.samples = [row for event in events if isinstance(event, SamplesGenerated) for row in event.rows]
        self.metrics = [
            {name: value for name, value in event.metrics.items() if not SECONDS.match(name)} for event in events if isinstance(event, StepFinished)
        ]
        self.traces: list[Trace] = [event.trace for event in events if isinstance(event, StepTraced)]


@pytest.fixture(scope="module")
def runs(cluster: None, engine_config: EngineConfig, model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    assert CPUS >= 4
    found = {}
    for placement in PLACEMENTS:
        config = engine_config.model_copy(update={"resources": shipped(placement), "reference": True, "critic": True})
        found[placement] = Run(config, model_directory, tmp_path_factory.mktemp(placement))
    return found


@pytest.mark.parametrize("placement", PLACEMENTS[1:])
def test_the_same_run_wherever_the_roles_sit(runs: dict[str, Run], placement: str) -> None:
    # Mutations: shares of a future by the number of the making ranks; seeds by rank; rewards in the order in which they finish.
    one, other = runs["colocated"], runs[placement]
    assert other.samples == one.samples
    assert len({row["sample_id"] for row in one.samples}) == len(one.samples) == 2 * 32
    assert other.metrics == one.metrics
    assert all(torch.equal(one.weights[name], tensor) for name, tensor in other.weights.items())
    # Else nothing was trained, and anything would be equal.
    assert all(step["policy/gradient_norm"] > 0 and step["critic/loss"] > 0 for step in one.metrics)
    assert one.metrics[1]["policy/kl_from_reference"] > 0


def test_the_files_say_who_shares_a_process(runs: dict[str, Run]) -> None:
    assert set(runs["colocated"].pools.values()) == {"main"}
    assert len(set(runs["split"].pools.values())) == 4
    mixed = runs["mixed"].pools
    assert mixed["actor"] == mixed["reward"] != mixed["reference"] == mixed["critic"]
    # Mutation: open pools that no role sits in.
    for run in runs.values():
        assert {operation.role: operation.pool for operation in run.traces[0].operations} == {role: run.pools[role] for role in run.pools}


def spans(trace: Trace, name: str) -> list[tuple[float, float]]:
    return [
        (span.started, span.ended) for operation in trace.operations if f"{operation.role}.{operation.operator}" == name for span in operation.spans
    ]


def overlap(trace: Trace, one: str, other: str) -> float:
    """Seconds in which some rank runs one operator and some rank the other."""
    return max(min(a[1], b[1]) - max(a[0], b[0]) for a in spans(trace, one) for b in spans(trace, other))


def test_independent_calls_run_side_by_side(runs: dict[str, Run]) -> None:
    # Reference, old log-probs and values need the rollout and not each other. Mutation: `.get()` behind each call in `SyncTrainer.step`.
    for trace in runs["split"].traces:
        assert overlap(trace, "actor.log_prob", "reference.log_prob") > 0
        assert overlap(trace, "actor.log_prob", "critic.values") > 0
        assert overlap(trace, "reference.log_prob", "critic.values") > 0


def test_rewards_begin_while_others_are_still_drawn(runs: dict[str, Run]) -> None:
    # Mutations: tell the rewards after the last sample; run them in the thread that generates (colocated).
    for placement in PLACEMENTS:
        for trace in runs[placement].traces:
            (ahead,) = [operation for operation in trace.operations if operation.operator == "score_ahead"]
            assert len(ahead.spans) > 1
            assert min(span.started for span in ahead.spans) < max(end for _, end in spans(trace, "actor.generate"))


def test_what_the_next_call_needs_comes_first(runs: dict[str, Run]) -> None:
    for run in runs.values():
        for trace in run.traces:
            by_id = {operation.id: operation for operation in trace.operations}
            assert trace.edges
            for edge in trace.edges:
                source, target = by_id[edge.source], by_id[edge.target]
                assert max(span.ended for span in source.spans) <= min(span.ended for span in target.spans)
                assert edge.bytes > 0


def test_the_batches_do_not_pass_through_the_controller(runs: dict[str, Run]) -> None:
    # The 1 % is measured on the main recipe by bench/controller.py: a toy's batches are hardly larger than its settings. Mutation: fetch the
    # rollout in the loop.
    for trace in runs["split"].traces:
        rollout = next(operation for operation in trace.operations if operation.operator == "generate")
        assert {wait.name for wait in trace.controller} == {"lengths", "agreement", "measure", "measure_trained", "visits", "update", "synchronise"}
        assert trace.controller_bytes < rollout.result_bytes
        assert rollout.result_bytes > 5_000

"""Running engines of two and of four ranks beside hybrid and full shards: the weights of both are the same, for no byte too many."""

from pathlib import Path

import pytest
import torch
from toy import prompt

from engine.config import (
    ArchitectureConfig,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    ResourcesConfig,
    RLStageConfig,
    RolloutConfig,
    SamplingConfig,
    StageTrainingConfig,
    TrainingConfig,
)
from engine.control.future import join
from engine.model import create
from engine.rollout.plan import SamplePlan
from engine.trainer.session import Session

RANKS = 4
BOUND = 1e-4
"""nats, in float32."""
ARCHITECTURE = ArchitectureConfig(
    hidden_size=64, layers=2, attention_heads=4, key_value_heads=2, head_dim=32, feed_forward_size=128, max_context_tokens=128
)
STAGE = RLStageConfig(
    kind="rl",
    steps=3,
    prompts_per_step=4,
    max_prompt_tokens=32,
    max_response_tokens=8,
    training=StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=3e-2), max_tokens_per_micro_batch=256),
)
QUESTIONS = [prompt(f"{a}+{a}", a) for a in range(4)]


@pytest.mark.parametrize(("parts", "shard_ranks"), [(2, 2), (4, None)], ids=["TP 2, hybrid shards", "TP 4, full shards"])
def test_engines_of_several_ranks_have_the_trainers_weights(
    cluster: None, engine_config: EngineConfig, tmp_path: Path, parts: int, shard_ranks: int | None
) -> None:
    # Mutation: `joint_layout` of rank 0's wants for every rank; `Synchroniser` with the first synchronisation's shards.
    config = engine_config.model_copy(
        update={
            "max_context_tokens": ARCHITECTURE.max_context_tokens,
            "resources": ResourcesConfig(ranks=RANKS, device="cpu", call_deadline_seconds=240),
            "rollout": RolloutConfig(tensor_parallel_ranks=parts, max_concurrent_samples=16, max_proof_share=None),
            "training": TrainingConfig(shard_ranks=shard_ranks),
        }
    )
    model = create(ModelConfig(architecture=ARCHITECTURE), 0, tmp_path / "model")
    with Session.open(config, model, tmp_path / "workers") as session:
        session.load_prompts("questions", QUESTIONS)
        session.actor.begin_stage(STAGE).get()
        ids = torch.randint(7, 100, (4, 12), generator=torch.Generator().manual_seed(1))
        session.actor.load_rows([(row.tolist(), [False] + [True] * 11) for row in ids]).get()
        for _ in range(3):
            session.actor.update_sft(list(range(4))).get()
        ledgers = session.actor.synchronise().get()
        rollout = session.actor.generate(SamplePlan("questions", (0, 1, 2, 3), 2, SamplingConfig(), 8, 7, "test", 0))
        agreement = session.actor.agreement(join(rollout, session.actor.log_prob(rollout))).get().result()
    assert agreement["policy/max_log_prob_difference"] <= BOUND
    assert all(ledger["proof_coverage"] == 1 for ledger in ledgers)
    assert all(ledger["bytes_received"] <= 1.01 * ledger["bytes_minimum"] for ledger in ledgers)
    assert max(ledger["bytes_minimum"] for ledger in ledgers) > 0

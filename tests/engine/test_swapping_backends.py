"""One line of configuration changes the training backend, or the rollout backend, and nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
from probe import open_probed
from toy import ARCHITECTURE, CONVERSATIONS, SFT, prompt

from engine.config import EngineConfig, ModelConfig, OptimizerConfig, RewardConfig, RLStageConfig, StageTrainingConfig
from engine.events import SamplesGenerated, StepFinished
from engine.model import create
from engine.trainer.sft import train_sft
from engine.trainer.sync import train_rl

PROMPTS = [prompt(f"{a}+{b}", index=4 * a + b, answer=str(1 + (a + b) % 2)) for a in range(2) for b in range(4)]
# At SFT's own learning rate, meant to overshoot, float32's rounding alone grows beyond 1e-5 within ten steps.
TEN_STEPS = SFT.model_copy(update={"steps": 10, "training": StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=3e-3))})
RL = RLStageConfig(
    kind="rl",
    steps=2,
    prompts_per_step=4,
    samples_per_prompt=4,
    max_prompt_tokens=32,
    max_response_tokens=8,
    reward=RewardConfig(default="exact_match"),
    training=StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-3), max_tokens_per_micro_batch=96),
    samples_table_every_steps=1,
)
# Each differs from the first by one line. The plain rollout starts in no time, so the training backends are compared with it.
PLAIN = {"rollout": {"backend": "transformers"}}
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "fsdp": PLAIN,
    "tensor_parallel": {**PLAIN, "training": {"backend": "tensor_parallel"}},
    "vllm over two ranks": {"rollout": {"backend": "vllm", "tensor_parallel_ranks": 2}},
}


class Run:
    """Ten steps of SFT that are compared, some more until the model answers in boxes, two of RL."""

    def __init__(self, config: EngineConfig, model_directory: Path, directory: Path) -> None:
        events: list[Any] = []
        with open_probed(config, model_directory, directory) as session:
            train_sft(session, "sft", TEN_STEPS, CONVERSATIONS, seed=0, emit=events.append)
            train_sft(session, "teach", SFT.model_copy(update={"steps": 30}), CONVERSATIONS, seed=1, emit=lambda event: None)
            train_rl(session, "rl", RL, PROMPTS, 0, events.append)
        steps = [event for event in events if isinstance(event, StepFinished)]
        self.losses = [event.metrics["sft/loss"] for event in steps if event.stage == "sft"]
        self.norms = [event.metrics["policy/gradient_norm"] for event in steps if event.stage == "sft"]
        self.rl = [event.metrics for event in steps if event.stage == "rl"]
        self.samples = [row for event in events if isinstance(event, SamplesGenerated) for row in event.rows]


@pytest.fixture(scope="module")
def runs(cluster: None, engine_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    # Two key-value heads, so that each of two ranks can have one.
    architecture = ARCHITECTURE.model_copy(update={"key_value_heads": 2})
    model_directory = create(ModelConfig(architecture=architecture), 0, tmp_path_factory.mktemp("model") / "model")
    found = {}
    for name, changes in ARMS.items():
        update = {part: getattr(engine_config, part).model_copy(update=settings) for part, settings in changes.items()}
        found[name] = Run(engine_config.model_copy(update=update), model_directory, tmp_path_factory.mktemp("arm"))
    return found


def test_ten_steps_of_another_training_backend_have_the_same_losses(runs: dict[str, Run]) -> None:
    # Mutations: gradients summed over tensor-parallel ranks as if they held other data; results gathered from both of them.
    one, other = runs["fsdp"], runs["tensor_parallel"]
    assert len(one.losses) == 10
    assert other.losses == pytest.approx(one.losses, abs=1e-5)
    assert other.norms == pytest.approx(one.norms, rel=1e-4)
    assert one.losses[-1] < one.losses[0] - 0.5


@pytest.mark.parametrize("arm", ARMS)
def test_trainer_and_rollout_agree(runs: dict[str, Run], arm: str) -> None:
    # Mutation: weights of a tensor-parallel trainer handed over in shards.
    for metrics in runs[arm].rl:
        assert metrics["policy/max_log_prob_difference"] <= 1e-4
        assert metrics["policy/gradient_norm"] > 0


def test_the_same_samples_are_asked_for(runs: dict[str, Run]) -> None:
    ids = [row["sample_id"] for row in runs["fsdp"].samples]
    assert len(set(ids)) == len(ids) == 2 * 16
    assert all([row["sample_id"] for row in run.samples] == ids for run in runs.values())
    # The two trainers have the same weights but for rounding, and the same seeds: a plain rollout draws the same from both, but for a toss that
    # falls within the rounding.
    pairs = zip(runs["tensor_parallel"].samples[:16], runs["fsdp"].samples[:16], strict=True)
    assert sum(one["response"] == other["response"] for one, other in pairs) >= 12

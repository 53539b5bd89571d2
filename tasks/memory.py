"""How much memory a recipe takes on each rank, phase by phase: arithmetic on its configuration and its model's architecture, without loading it."""

from dataclasses import dataclass

from engine.hardware import resolve_device
from tasks.architecture import Architecture
from tasks.config import RecipeConfig
from tasks.devices import Device

MASTER_BYTES = 4
"""Parameters, gradients and both moments of AdamW are kept in float32."""
LAYERS_GATHERED = 2
"""FSDP fetches the next layer while one computes."""
LOGITS_COPIES = 3
"""Logits, their softmax, and the gradient of one of them, in float32."""
CONTEXT_BYTES = 1.5e9
"""What CUDA, NCCL and the allocator keep for themselves on a GPU."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank."""

    rollout: float
    """The generation engine, which keeps what it has in every phase."""
    rollout_weights: float
    cache_tokens: float
    """Tokens that its key-value cache holds."""
    cached_samples: float
    """The same in samples of the longest length that the recipe generates."""
    state: float
    """Shards of weights, gradients and optimizer, of all trained roles; the reference's weights."""
    host_state: float
    """The same where `training.offload` keeps it in the host's memory."""
    training: dict[str, float]
    """What a pass of training takes beside that, by name."""
    synchronising: float
    """Buckets, and the largest slice on its way."""
    fixed: float

    def phases(self) -> dict[str, float]:
        """All that is there in each phase, bytes."""
        resident = self.rollout + self.state + self.fixed
        return {"generate": resident, "update": resident + sum(self.training.values()), "synchronise": resident + self.synchronising}

    @property
    def peak(self) -> float:
        """Bytes of the phase that takes most."""
        return max(self.phases().values())


def memory(config: RecipeConfig, architecture: Architecture, device: Device) -> Memory:
    """Memory of one rank of the actor's pool, the roles that share it included."""
    pool = config.resources.pool_of("actor")
    ranks, parts = config.resources.ranks_of("actor"), config.rollout.tensor_parallel_ranks
    on_gpu, element = resolve_device(config.resources.pool(pool).device) == "cuda", device.element_bytes
    weights = architecture.parameters * element / parts
    cache = config.rollout.kv_cache_gigabytes * 2**30
    rollout = config.rollout.gpu_memory_fraction * device.memory_bytes if on_gpu else weights + cache
    cache_tokens = max(0.0, rollout - weights) / architecture.cache_bytes(element, parts)
    state = _state(config, architecture, ranks)
    offload = config.training.offload and on_gpu
    largest = max(architecture.vocabulary, architecture.feed_forward) * architecture.hidden * element / ranks
    return Memory(
        rollout=rollout,
        rollout_weights=weights,
        cache_tokens=cache_tokens,
        cached_samples=cache_tokens / config.max_context_tokens(),
        state=0.0 if offload else state,
        host_state=state if offload else 0.0,
        training=_training(config, architecture, element, ranks),
        synchronising=2 * config.rollout.bucket_megabytes * 1e6 + largest,
        fixed=CONTEXT_BYTES if on_gpu else 0.0,
    )


def _state(config: RecipeConfig, architecture: Architecture, ranks: int) -> float:
    """Shards that stay from step to step."""
    shards = config.training.shard_ranks or ranks
    own = architecture.parameters * MASTER_BYTES / shards
    here, engine = config.resources.pool_of("actor"), config.engine()
    together = {role for role in engine.roles() if config.resources.pool_of(role) == here}
    trained = 1 + ("critic" in together)
    # With LoRA the base alone stays: adapters and what belongs to them are a percent of it.
    copies = 1 if config.training.lora is not None else 4
    return own * (copies * trained + ("reference" in together))


def _training(config: RecipeConfig, architecture: Architecture, element: int, ranks: int) -> dict[str, float]:
    """What the largest pass takes on top, by name."""
    tokens = max(_pass_tokens(config))
    rows = min(config.training.logits_rows_at_once, tokens)
    # Tensor parallelism divides what is inside the layers.
    parts = ranks // config.training.data_parts(ranks)
    checkpointed = config.training.gradient_checkpointing
    stream = architecture.hidden * element * tokens
    # Of a layer: what stands between its matrices. Attention's own matrix is never whole.
    queries, pairs = architecture.heads * architecture.head_dim, 2 * architecture.key_value_heads * architecture.head_dim
    inside = (4 * architecture.hidden + 2 * queries + pairs + 3 * architecture.feed_forward) * element * tokens / parts
    layer, root = architecture.layer_parameters / parts, architecture.root_parameters
    one_pass = config.training.shard_gradients_every_pass
    whole = layer * (1 if one_pass else architecture.layers) + root
    return {
        "parameters gathered": (LAYERS_GATHERED * layer + root) * element if ranks > parts else 0.0,
        "gradients not yet in shards": whole * MASTER_BYTES if ranks > parts else 0.0,
        "activations": stream * architecture.layers + inside if checkpointed else (stream + inside) * architecture.layers,
        "logits": rows * architecture.vocabulary * MASTER_BYTES * LOGITS_COPIES,
    }


def _pass_tokens(config: RecipeConfig) -> list[int]:
    """Most tokens of one pass of each stage that trains: a longer row makes a pass of its own."""
    found = []
    for stage in config.stages.values():
        if stage.kind == "sft":
            found.append(max(stage.training.max_tokens_per_micro_batch, stage.max_tokens))
        elif stage.kind == "rl":
            found.append(max(stage.training.max_tokens_per_micro_batch, stage.max_prompt_tokens + stage.max_response_tokens))
    return found or [0]

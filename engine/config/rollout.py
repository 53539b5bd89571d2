"""How responses are generated."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from engine.config.base import Fraction, Positive, Settings, known


class RolloutConfig(Settings):
    """The generation engine."""

    backend: str = "vllm"
    """`vllm`, `transformers`, or `module:Class` of one's own."""
    tensor_parallel_ranks: Positive = 1
    """Ranks that share one rollout engine."""
    max_concurrent_samples: Positive = 128
    """Samples that one rank decodes side by side."""
    kv_cache_gigabytes: Annotated[float, Field(gt=0)] = 0.25
    """Key-value cache of one rank on a CPU. On GPUs `gpu_memory_fraction` decides."""
    gpu_memory_fraction: Fraction = 0.5
    """Share of a GPU's memory that the rollout engine takes for weights and cache."""
    bucket_megabytes: Annotated[float, Field(gt=0)] = 256.0
    """Largest size of the weights that a rank sends and receives at a time when they are synchronised; two such buckets are in flight."""
    max_proof_share: Annotated[float, Field(gt=0, lt=1)] | None = 0.05
    """Share of a synchronisation's seconds that comparing the weights may take. The first one compares everything, later ones as many slices as
    that allows, in turns; null always compares everything."""
    changed_only: bool = False
    """Synchronise only the elements that changed since the last time, where that is fewer bytes. Sender and receiver then keep copies of all that
    travels. It pays in bfloat16 with small learning rates and a slow wire; in float32 nearly every element changes with each step."""
    max_log_prob_difference: Annotated[float, Field(gt=0)] | None = 1e-3
    """Largest |trainer - rollout| log-prob of a step's response tokens before the run stops; null only reports. 1e-3 suits float32: rounding
    alone stays below 1e-4 on all but single tokens, other weights give 1e-2 and more."""

    @model_validator(mode="after")
    def _known_backend(self) -> Self:
        from engine.rollout.registry import BACKENDS

        known(BACKENDS, "backend", self.backend)
        return self


class SamplingConfig(Settings):
    """How one response is drawn."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Logits are divided by it, in the rollout and in the training log-probs alike."""
    top_p: Fraction = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 keeps every token."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Tokens less likely than this share of the likeliest token's probability are not drawn; 0 keeps every token."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a response, beside the end of turn; the text itself is kept."""

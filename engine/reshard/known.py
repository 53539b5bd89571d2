"""Configurations of models that a machine without a network can still plan for."""

from transformers import AutoConfig, PreTrainedConfig

_QWEN3 = {
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-6,
}

KNOWN = {
    # config.json of huggingface.co/Qwen/Qwen3-4B; the card counts 4.0 billion parameters, 3.6 without the embedding.
    "qwen3_4b": ("qwen3", _QWEN3 | {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    }),
    # config.json of huggingface.co/Qwen/Qwen3-32B; the card counts 32.8 billion, 31.2 without embedding and head.
    "qwen3_32b": ("qwen3", _QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }),
    # config.json of huggingface.co/Qwen/Qwen3-235B-A22B; the card counts 235 billion, 234 without embedding and head.
    "qwen3_235b_a22b": ("qwen3_moe", _QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "tie_word_embeddings": False,
    }),
}  # fmt: skip
"""By name: the architecture as transformers names it, and its values."""


def known_config(name: str) -> PreTrainedConfig:
    """The configuration of one of `KNOWN`."""
    family, values = KNOWN[name]
    return AutoConfig.for_model(family, **values)

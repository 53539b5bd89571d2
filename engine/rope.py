"""Rotary position embeddings, extended in place and put back: the same frequencies for trainer and rollout."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config import LengthExtensionConfig


def extended_frequencies(config: PreTrainedConfig, extension: LengthExtensionConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [rotary dimensions / 2] float32, and what cosine and sine are multiplied by. `config` stays as it is.

    Of dimension pair i of d/2, with base b, length L and factor s (arXiv:2309.00071, section 3.2):

        f_i = b^(-2i/d)                                             as the model has it
        g_i = (1 - r_i) f_i / s + r_i f_i                           r_i: 1 for fast pairs, 0 for slow ones, linear between
        r_i = 1 - clip((i - low) / (high - low), 0, 1)
        low, high: floor and ceiling of d ln(L / (2 pi t)) / (2 ln b) for t = 32 and t = 1 turns over L

    Raises:
        ValueError: the model's own RoPE is not plain.
    """
    rope = config.rope_parameters or {}
    if rope.get("rope_type") != "default":
        raise ValueError(f"length_extension: the RoPE of model {config.model_type} is not plain ({rope or 'there is none'}); leave it out")
    extended = copy.deepcopy(config)
    extended.rope_parameters = {
        **rope,
        "rope_type": "yarn",
        "factor": extension.factor,
        "attention_factor": extension.attention_factor,
        "original_max_position_embeddings": extension.original_max_context_tokens or config.max_position_embeddings,
    }
    frequencies, attention = ROPE_INIT_FUNCTIONS["yarn"](extended)
    return frequencies, float(attention)


def extend(model: nn.Module, config: PreTrainedConfig, extension: LengthExtensionConfig | None) -> None:
    """Of a model of transformers: positions are embedded like this from now on; with None as the model has it, to the last bit.

    Raises:
        ValueError: the model's RoPE cannot be extended.
    """
    rotary: list[Any] = [module for module in model.modules() if isinstance(getattr(module, "original_inv_freq", None), torch.Tensor)]
    if extension is None or extension.changes_nothing:
        if (config.rope_parameters or {}).get("rope_type") == "default":  # No other is ever extended.
            for module in rotary:
                module.inv_freq.copy_(module.original_inv_freq)
                module.attention_scaling = 1.0
        return
    frequencies, attention = extended_frequencies(config, extension)
    if not rotary:
        raise ValueError(f"length_extension: model {config.model_type} keeps its frequencies in a place of its own; leave it out")
    for module in rotary:
        module.inv_freq.copy_(frequencies)
        module.attention_scaling = attention

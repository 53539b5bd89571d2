"""Causal attention within each sample of a packed row, registered with transformers under `PACKED`."""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from engine.training.packing import Packing

PACKED = "almanac_packed"
"""The name for `attn_implementation`. Forward passes then need the keyword `packing`, which models hand on to their attention layers."""
INSTEAD = "set training.pack_sequences=false"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, N, D], key and value [1, key heads, N, D] to [1, N, heads, D], by the contract of `AttentionInterface`.

    Flash attention over the packed row where the device has it, else one call for each sample: on one CPU core that is faster than one call
    over padded rows, by 1.6 times for 200 samples of 20 to 60 tokens and by 13 times for one of 4000 among 14 of 290. No mask is made.

    Raises:
        ValueError: the layer asks for attention that is not plainly causal over the whole sample, or `packing` did not reach it.
    """
    if packing is None:
        raise ValueError(f"{type(module).__name__} does not hand keywords on to its attention; {INSTEAD}")
    changed = [name for name in ("sliding_window", "softcap", "s_aux", "sinks", "position_bias") if others.get(name) is not None]
    changed += ["dropout"] * (dropout > 0) + ["attention_mask"] * (attention_mask is not None)
    if changed or not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise ValueError(f"{type(module).__name__} asks for attention with {', '.join(changed) or 'sight of later tokens'}; {INSTEAD}")
    grouped = query.shape[1] != key.shape[1]
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query, key, value, packing, scaling, grouped), None
    samples = zip(*(torch.split(tensor, packing.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    results = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped) for q, k, v in samples]
    return torch.cat(results, dim=2).transpose(1, 2), None


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scaling: float | None, grouped: bool) -> torch.Tensor:
    """All samples in one call."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))  # [N, heads, D]
    longest = max(packing.lengths)
    causal = (-1, 0)
    result = varlen_attn(q, k, v, packing.starts, packing.starts, longest, longest, scale=scaling, window_size=causal, enable_gqa=grouped)
    assert isinstance(result, torch.Tensor)  # a tuple only where more was asked for
    return result.unsqueeze(0)


def _no_mask(*, use_vmap: bool = False, **_: Any) -> None:
    """In place of the mask [N, N] that transformers would build; `use_vmap` says that the model overlays one of its own."""
    if use_vmap:
        raise ValueError(f"this architecture masks attention in a way of its own; {INSTEAD}")


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _no_mask)


def use_packed_attention(causal: PreTrainedModel) -> None:
    """Sets `PACKED`. ValueError where the architecture cannot take it, be it by its configuration or by its code."""
    check_packable(causal.config)
    causal.set_attn_implementation(PACKED)
    # transformers only warns here, and goes on with attention over the whole row.
    if causal.config._attn_implementation != PACKED or not causal._supports_attention_backend:
        raise ValueError(f"model {causal.config.model_type} has attention of its own that packing cannot replace; {INSTEAD}")


def check_packable(config: PreTrainedConfig) -> None:
    """ValueError where layers look at anything but all earlier tokens of their sample, as far as the configuration tells."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if others := kinds - {"full_attention"}:
        raise ValueError(f"model {config.model_type} has layers of {', '.join(sorted(others))}, which packing does not honour; {INSTEAD}")
    if not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None) is not None:
        raise ValueError(f"model {config.model_type} attends within sliding_window={config.sliding_window} only; {INSTEAD}")

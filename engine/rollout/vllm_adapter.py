"""Low-rank adapters in vLLM: what it has to be told at the start, and the proof that it holds the adapter that it was given."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config.lora import MaxLoRARanks
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.lora.utils import parse_fine_tuned_lora_name

from engine.config import LoRAConfig
from engine.training.lora import adapted_layers


def adapter_arguments(model_directory: Path, lora: LoRAConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of vLLM's engine. ValueError names the key that asks for what vLLM does not do."""
    if device.type == "cuda" and dtype is torch.float32:
        raise ValueError("model.dtype: on GPUs vLLM applies adapters in bfloat16 only; set bfloat16, or choose rollout.backend=transformers")
    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank]
    if not ranks:
        raise ValueError(
            f"training.lora.rank: vLLM takes at most {max(get_args(MaxLoRARanks))}, not {lora.rank}; lower it, or choose rollout.backend=transformers"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_directory))
    # Left to itself vLLM would multiply by empty adapters of all other layers as well, of the output head above all.
    targets = adapted_layers(model, lora.target_modules)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(ranks), "lora_target_modules": targets}


def check_adapter(model: Any, weights: Mapping[str, torch.Tensor], scaling: float) -> None:
    """Compares, bit by bit, what this rank's layers multiply by with its part of the adapter.

    Args:
        model: vLLM's, of one rank, with a single adapter in use.
        weights: of `adapter_weights`, in the engine's dtype.
        scaling: alpha / rank, which vLLM multiplies B by.

    Raises:
        RuntimeError: a layer holds something else; it is named.
        ValueError: vLLM has no place for the adapter of a layer; it is named.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    names = mapper.get_rename_mapper() if mapper is not None else None
    given = {parse_fine_tuned_lora_name(name, names): tensor for name, tensor in weights.items()}
    for name, layer in model.lora_manager.modules.items():
        # A fused layer has an adapter for each of those that it is made of.
        parts = model.lora_manager.packed_modules.get(name, [name])
        for part, a, b in zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
            whole_a, whole_b = given.pop((part, True), None), given.pop((part, False), None)
            scaled_b = whole_b * scaling if whole_b is not None else None
            if not (_holds(a[0, 0].T, whole_a.T if whole_a is not None else None) and _holds(b[0, 0], scaled_b)):
                raise RuntimeError(f"after a synchronisation the rollout engine holds another adapter than the trainer's: that of {part}")
    if given:
        layers = ", ".join(sorted({layer for layer, _ in given}))
        raise ValueError(
            f"training.lora.target_modules: vLLM has no place for the adapters of {layers}; leave them out, or choose rollout.backend=transformers"
        )


def _holds(held: torch.Tensor, whole: torch.Tensor | None) -> bool:
    """Whether `held` [own rows, largest rank] is this rank's rows of `whole` [rows, rank], and zero beyond its rank."""
    if whole is None:
        return not held.any()
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    # Rows that are fewer than the ranks lie on several: of as many key-value heads, say, or all of them on all.
    parts = whole.shape[0] // held.shape[0]
    start = rank * parts // ranks * held.shape[0]
    used, unused = held.cpu().tensor_split([whole.shape[1]], dim=1)
    return torch.equal(used, whole[start : start + held.shape[0]]) and not unused.any()

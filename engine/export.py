"""Writes a checkpoint that `transformers` and vLLM load."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.atomic import atomic_directory

WEIGHTS = "model.safetensors"


def save_checkpoint(weights: Iterable[tuple[str, torch.Tensor]], config: Any, tokenizer: Any, directory: Path, *, writes: bool) -> None:
    """Consumes `weights` on every rank (gathering them is a collective) and writes them on the one that `writes`.

    A tied output head is left out, as `transformers` expects. The directory appears complete or not at all; one that is there
    already is replaced.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if writes:
            tensors[name] = tensor.cpu().contiguous().clone()
    if not writes:
        return
    with atomic_directory(directory) as fresh:
        save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})
        config.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        _verify(fresh / WEIGHTS, tensors)


def _verify(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Reads every tensor back and compares it bit by bit. Raises `OSError` naming the first that differs."""
    with safe_open(path, framework="pt") as written:
        if set(written.keys()) != set(tensors):
            raise OSError(f"{path}: the file holds other tensors than were written")
        for name, tensor in tensors.items():
            if not torch.equal(written.get_tensor(name), tensor):
                raise OSError(f"{path}: tensor {name} differs from what was written; the disk may be full or faulty")

"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685, section 4.1), with the layers and the checkpoint format of the library peft.

An adapted layer computes W x + alpha / rank * B A x; W is frozen, A [rank, in] starts random, and B [out, rank] starts at zero. Nothing here
knows how parameters are sharded: where whole ones are needed, the caller says how a parameter is made whole. peft is imported where it is
called, because that takes seconds, and models without adapters come through here as well.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.atomic import atomic_directory
from engine.config import LoRAConfig

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"
"""peft's name of the one adapter; it is part of the names of parameters, and not of those in a checkpoint."""
PREFIX = "base_model.model."
"""What peft's checkpoints put before the names of the base model."""
ALL_LINEAR = "all_linear"

Whole = Callable[[Tensor], Tensor]
"""Makes a (sharded) tensor whole; a collective where it is sharded."""


def add_adapters(model: PreTrainedModel, config: LoRAConfig) -> None:
    """Puts adapters into a causal language model, in place, before it is sharded. Only they are trainable afterwards.

    They start the same on every rank, and the model computes what it computed before.

    Raises:
        ValueError: a target module that is not a linear layer of the model; the key and the names that exist are in the message.
    """
    from peft import inject_adapter_in_model

    described = _peft_config(config, adapted_layers(model, config.target_modules))
    with torch.random.fork_rng(devices=[]):  # peft draws a start of its own, which is replaced below
        inject_adapter_in_model(described, model, adapter_name=ADAPTER)
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, start in starting_adapters(model):
            parameters[name].copy_(start)


def adapted_layers(model: PreTrainedModel, wanted: list[str]) -> list[str]:
    """Last parts of the names of the layers that `training.lora.target_modules` asks for.

    The output head is none of them: where it is tied, its adapter would have to be the embedding's too. ValueError as `add_adapters`.
    """
    head = model.get_output_embeddings()
    linear = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head})
    unknown = [name for name in wanted if name not in (*linear, ALL_LINEAR)]
    if unknown or not wanted:
        what = f"{', '.join(unknown)} is not a linear layer of this model" if unknown else "it is empty"
        raise ValueError(f"training.lora.target_modules: {what}; there are: {', '.join(linear)}; or {ALL_LINEAR}")
    return linear if ALL_LINEAR in wanted else sorted(set(wanted))


def starting_adapters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What adapters start from, by parameter name, whole, float32 on the host: A as `nn.Linear` would (uniform), B zero. Always the same."""
    generator = torch.Generator().manual_seed(0)  # not the run's: the adapter is a function of the architecture, and B makes it 0 anyway
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            start = torch.empty(parameter.shape, dtype=torch.float32)
            nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
            yield name, start
        elif is_adapter(name):
            yield name, torch.zeros(parameter.shape, dtype=torch.float32)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """The name that a parameter of the base model has without adapters."""
    return name.replace(".base_layer.", ".")


def merged_weights(model: nn.Module, whole: Whole, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The base model's parameters by their names without adapters, one at a time, with W + alpha / rank * B A in place of W.

    The sum is formed in the type that parameters are kept in, and cast to `dtype` then; all other parameters are cast before they are made
    whole. A tied output head is not given a second time. A model without adapters gives its parameters as they are.
    """
    layers = _adapted(model)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        if layer is None:
            yield base_name(name), whole(parameter.detach().to(dtype))
        else:
            a, b = (whole(part[ADAPTER].weight.detach()) for part in (layer.lora_A, layer.lora_B))
            yield base_name(name), torch.addmm(whole(parameter.detach()), b, a, alpha=layer.scaling[ADAPTER]).to(dtype)


def adapter_weights(model: nn.Module, whole: Whole, dtype: torch.dtype) -> dict[str, Tensor]:
    """A copy of the adapters alone, on the host, by the names of peft's checkpoints; cast to `dtype` before they are made whole."""
    return {name: whole(parameter.detach().to(dtype)).to("cpu", copy=True) for name, parameter in _adapters(model).items()}


def take_adapters(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies what `adapter_weights` gave into the adapters of a whole model, cast to their type. ValueError where they are of another model."""
    own = _adapters(model)
    if own.keys() != weights.keys():
        missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
        raise ValueError(f"these are not the adapters of this model: missing {missing}, unknown {unknown}")
    for name, parameter in own.items():
        parameter.detach().copy_(weights[name])


def adapters_off(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, the model computes bit by bit what the base computes. RuntimeError where it has no adapters."""
    if not (layers := list(_adapted(model).values())):
        raise RuntimeError("the model has no adapter to do without; set training.lora")
    return _off(layers)


@contextmanager
def _off(layers: list[Any]) -> Iterator[None]:
    # Not peft's `enable_adapters`: it also changes `requires_grad`, which sharding has copied to parameters of its own.
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, off in zip(layers, before, strict=True):
            layer._disable_adapters = off


def export_adapter(directory: Path, weights: Mapping[str, Tensor], config: LoRAConfig, base_model: str | None = None) -> None:
    """Writes what `PeftModel.from_pretrained(base, directory)` loads. The directory appears complete or not at all, or is replaced.

    Args:
        directory: gets adapter_model.safetensors and adapter_config.json.
        weights: of `adapter_weights`.
        config: what the adapters were made by.
        base_model: where the base lies, for programs that load both at once.
    """
    targets = sorted({name.split(".")[-3] for name in weights})
    described = _peft_config(config, targets)
    described.inference_mode = True
    described.base_model_name_or_path = base_model
    described.target_modules = targets  # peft makes a set of it, whose order in the file would change from process to process
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    with atomic_directory(directory) as fresh:
        save_file(tensors, fresh / "adapter_model.safetensors", metadata={"format": "pt"})
        described.save_pretrained(str(fresh))
        with safe_open(fresh / "adapter_model.safetensors", framework="pt") as written:
            for name, tensor in tensors.items():
                if not torch.equal(written.get_tensor(name), tensor):
                    raise OSError(f"{directory}: tensor {name} differs from what was written; the disk may be full or faulty")


def _adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {PREFIX + name.replace(f".{ADAPTER}.", "."): parameter for name, parameter in model.named_parameters() if is_adapter(name)}


def _adapted(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def _peft_config(config: LoRAConfig, targets: list[str]) -> "LoraConfig":
    from peft import LoraConfig, TaskType

    return LoraConfig(task_type=TaskType.CAUSAL_LM, r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0, bias="none")

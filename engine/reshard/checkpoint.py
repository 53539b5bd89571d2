"""What a trainer keeps in place of the checkpoint's tensors: asked of transformers, on tensors without storage."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from engine.reshard.layout import Part, Tensor
from engine.reshard.recording import Recorder


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a model by their names in the checkpoint, and where each lies in the parameters that are trained."""

    tensors: dict[str, Tensor]
    parts: dict[str, Part]
    parameters: dict[str, Tensor]


def checkpoint_of(config: PreTrainedConfig, dtype: torch.dtype) -> Checkpoint:
    """From a configuration alone. A layer's experts, one tensor each in the checkpoint, may be one parameter of the trainer.

    Raises ValueError where the checkpoint's form of a tensor is not a slice of a parameter; it is named.
    """
    model = skeleton(config, dtype)
    parameters = dict(model.named_parameters())  # A tied head is in it once, under the embedding's name.
    recorder = Recorder(parameters, {})
    with recorder:
        saved = revert_weight_conversion(model, {name: parameter.detach() for name, parameter in parameters.items()})
    return Checkpoint(
        tensors={name: described(tensor) for name, tensor in saved.items()},
        parts={name: recorder.origin(tensor) for name, tensor in saved.items()},
        parameters={name: described(tensor) for name, tensor in parameters.items()},
    )


def skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of transformers, without storage."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def described(tensor: Any) -> Tensor:
    """Shape and type of a torch tensor."""
    return Tensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

"""From a Hugging Face directory to the model that a backend shards."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.config import TrainingConfig
from engine.training.attention import use_packed_attention
from engine.training.backend import Head
from engine.training.lora import add_adapters
from engine.training.scoring import PolicyModel, ResponseModel, ValueModel


def read(model_directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a Hugging Face directory, whole, in the host's memory."""
    return AutoModelForCausalLM.from_pretrained(model_directory, dtype=dtype, attn_implementation="sdpa")


def build(model_directory: Path, head: Head, config: TrainingConfig, dtype: torch.dtype) -> ResponseModel:
    """The model before it is sharded, in the host's memory, with parameters of `dtype`.

    Raises:
        ValueError: the architecture does not go with the settings; the key is named.
    """
    causal = read(model_directory, dtype)
    if config.pack_sequences:
        use_packed_attention(causal)
    if config.gradient_checkpointing:
        causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.lora is not None:
        add_adapters(causal, config.lora)  # Before the value head is there, which is trained beside them.
    model = ValueModel(causal, config.pack_sequences) if head == "value" else _policy(causal, config)
    return model.train()  # Layers recompute only what was kept while training.


def decoder_layers(causal: PreTrainedModel) -> torch.nn.ModuleList:
    """The blocks that make up the model. ValueError where the architecture keeps them elsewhere."""
    layers = getattr(causal.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ValueError(f"model {causal.config.model_type} does not keep its blocks under `layers`; choose another model or training.backend")
    return layers


def _policy(causal: PreTrainedModel, config: TrainingConfig) -> PolicyModel:
    return PolicyModel(causal, config.pack_sequences, config.logits_rows_at_once)

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from engine.published import SHAPES
from engine.reshard.checkpoint import checkpoint_of
from engine.reshard.layout import volume

# Billions of parameters, whole and without embedding and head, as the model cards give them.
CARDS = {"Qwen/Qwen3-4B": (4.0, 3.6), "Qwen/Qwen3-32B": (32.8, 31.2), "Qwen/Qwen3-235B-A22B": (235, 234)}


def known_config(name: str) -> PreTrainedConfig:
    shape = dict(SHAPES[name])
    return AutoConfig.for_model(shape.pop("model_type"), **shape)


@pytest.mark.parametrize("name", CARDS)
def test_the_shipped_configurations_have_as_many_parameters_as_their_cards_say(name: str) -> None:
    """Nothing is allocated. Mutation: one layer more, or another feed-forward size, is another number."""
    config = known_config(name)
    checkpoint = checkpoint_of(config, torch.bfloat16)
    ends = {key: tensor.elements for key, tensor in checkpoint.tensors.items() if key in ("model.embed_tokens.weight", "lm_head.weight")}
    assert ("lm_head.weight" in ends) == (not config.tie_word_embeddings)
    total = sum(tensor.elements for tensor in checkpoint.tensors.values())
    digits = 1 if CARDS[name][0] < 100 else 0
    assert (round(total / 1e9, digits), round((total - sum(ends.values())) / 1e9, digits)) == CARDS[name]
    # Every element of every parameter is in the checkpoint once.
    assert sum(volume(part.box) for part in checkpoint.parts.values()) == sum(tensor.elements for tensor in checkpoint.parameters.values())


def test_experts_are_tensors_of_their_own_in_the_checkpoint() -> None:
    """The names that Qwen/Qwen3-235B-A22B's own index has. Mutation: named_parameters() in place of the conversion gives one tensor a layer."""
    config = known_config("Qwen/Qwen3-235B-A22B")
    config.num_hidden_layers = 1
    checkpoint = checkpoint_of(config, torch.bfloat16)
    assert checkpoint.tensors["model.layers.0.mlp.experts.7.up_proj.weight"].shape == (1536, 4096)
    part = checkpoint.parts["model.layers.0.mlp.experts.7.up_proj.weight"]
    assert part.parameter == "model.layers.0.mlp.experts.gate_up_proj"
    assert part.box == ((7, 8), (1536, 3072), (0, 4096))

"""YaRN against its formula, worked out by hand, and put back to the last bit."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import LengthExtensionConfig
from engine.rollout.vllm import extended_table, rotary_tables
from engine.rope import extend, extended_frequencies


def config(**values: Any) -> Any:
    plain = {
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    return AutoConfig.for_model("qwen3", **(plain | values))


def test_the_frequencies_are_those_of_the_paper() -> None:
    """d = 32, b = 10000, L = 1024, s = 1.5.

    t turns over L: pair d ln(L / (2 pi t)) / (2 ln b) = 16 ln(162.97 / t) / 9.2103. For t = 32: 2.83, floor 2; for t = 1: 8.85, ceiling 9. So pairs
    0 to 2 stay, those from 9 on are divided by 1.5, and pair i between keeps the share r = 1 - (i - 2) / 7 of what it was.
    """
    found, attention = extended_frequencies(config(), LengthExtensionConfig(factor=1.5, attention_factor=1.0))
    assert 16 * math.log(1024 / (2 * math.pi * 32)) / math.log(10_000) == pytest.approx(2.83, abs=5e-3)
    assert 16 * math.log(1024 / (2 * math.pi)) / math.log(10_000) == pytest.approx(8.85, abs=5e-3)
    plain = [10_000 ** (-i / 16) for i in range(16)]
    kept = [1.0] * 3 + [1 - (i - 2) / 7 for i in range(3, 9)] + [0.0] * 7
    expected = [f * (r + (1 - r) / 1.5) for f, r in zip(plain, kept, strict=True)]
    # Mutations: every pair divided by 1.5 (linear interpolation); the ramp over dimensions in place of pairs.
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=0)
    # Of golden values one by one: pair 0, pair 5 = 10^(-1.25) (4/7 + 3/7 / 1.5), pair 15 = 10^(-3.75) / 1.5.
    assert found[[0, 5, 15]].tolist() == pytest.approx([1.0, 0.0562341325 * 0.857142857, 1.18552e-4], rel=1e-5)
    assert attention == 1.0


def test_the_attention_factor_is_the_papers_where_none_is_given() -> None:
    assert extended_frequencies(config(), LengthExtensionConfig(factor=1.5))[1] == pytest.approx(0.1 * math.log(1.5) + 1)


def test_the_original_context_can_be_another_than_the_models() -> None:
    # Mutation: the model's, whatever is given.
    short = LengthExtensionConfig(factor=1.5, original_max_context_tokens=256)
    found = extended_frequencies(config(), short)[0]
    assert torch.equal(found, extended_frequencies(config(max_position_embeddings=256), LengthExtensionConfig(factor=1.5))[0])
    assert not torch.equal(found, extended_frequencies(config(), LengthExtensionConfig(factor=1.5))[0])


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config()).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(24).unsqueeze(0) % 32).logits


def test_a_model_is_extended_in_place_and_put_back_to_the_last_bit(model: Any, tmp_path: Path) -> None:
    before, written = logits(model), model.config.to_dict()
    extend(model, model.config, LengthExtensionConfig(factor=4, attention_factor=1.2, original_max_context_tokens=16))
    extended = logits(model)
    assert not torch.allclose(extended, before)
    # As transformers itself computes a model that was made so. Mutations: the attention factor forgotten; frequencies of one layer alone.
    parameters = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "attention_factor": 1.2, "original_max_position_embeddings": 16}
    made = AutoModelForCausalLM.from_config(config(rope_parameters=parameters)).eval()
    made.load_state_dict(model.state_dict())
    torch.testing.assert_close(extended, logits(made), rtol=0, atol=1e-6)
    # What is exported says what the model was made with.
    assert model.config.to_dict() == written
    extend(model, model.config, None)
    assert torch.equal(logits(model), before)


def test_a_factor_of_one_changes_no_bit(model: Any) -> None:
    before = logits(model)
    for attention in (None, 1.0):
        extend(model, model.config, LengthExtensionConfig(factor=1, attention_factor=attention))
        assert torch.equal(logits(model), before)
    # Mutation: `factor == 1` alone is taken for nothing.
    extend(model, model.config, LengthExtensionConfig(factor=1, attention_factor=1.2))
    assert not torch.equal(logits(model), before)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 512},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    ],
)
def test_a_model_that_is_extended_already_is_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="length_extension: the RoPE of model qwen3 is not plain"):
        extended_frequencies(config(rope_parameters=rope), LengthExtensionConfig(factor=2))


def test_the_table_of_vllm_holds_the_cosines_and_sines_of_transformers(model: Any) -> None:
    extension = LengthExtensionConfig(factor=1.5, attention_factor=1.1, original_max_context_tokens=16)
    table = extended_table(model.config, extension, 40)
    extend(model, model.config, extension)
    cosines, sines = model.model.rotary_emb(torch.zeros(1, 40, 1), torch.arange(40).unsqueeze(0))
    # Transformers repeats every frequency for both halves of a head.
    assert torch.equal(table, torch.cat((cosines[0, :, :16], sines[0, :, :16]), dim=-1))


def test_another_way_of_embedding_positions_in_vllm_is_refused() -> None:
    with pytest.raises(ValueError, match="vLLM embeds positions by nothing"):
        rotary_tables(torch.nn.Linear(2, 2))

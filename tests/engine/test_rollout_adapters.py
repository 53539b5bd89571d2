"""Adapters in the rollout backends: they answer as the merged model does, and what vLLM holds is proved to be what it was given."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_worker import Drawn, InProcess, Ranks, draw
from safetensors.torch import load_file, save_file
from toy import ARCHITECTURE
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import LoRAConfig, ModelConfig, RolloutConfig
from engine.model import create
from engine.rollout.backend import Request
from engine.tokenizer import render_prompt
from engine.training.lora import adapter_weights, add_adapters

CONFIG = RolloutConfig(max_concurrent_samples=8)
WIDE = LoRAConfig(rank=4, alpha=6.0)
# A rank of which vLLM has no adapters, and a fused layer one part of which has none.
NARROW = LoRAConfig(rank=3, alpha=12.0, target_modules=["q_proj", "v_proj", "down_proj"])
LORA = {"vllm": WIDE, "pair": NARROW, "plain": WIDE, "plain narrow": NARROW}
RANKS = {"vllm": 1, "pair": 2}
LAYER = "base_model.model.model.layers.1"
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Opinionated, with a tied head."""
    directory = tmp_path_factory.mktemp("models") / "base"
    return create(ModelConfig(architecture=ARCHITECTURE.model_copy(update={"initializer_range": 0.3})), 0, directory)


@pytest.fixture(scope="module")
def start(model: Path) -> Iterator[Callable[[str], Any]]:
    """An engine by its name, the same at every call."""
    started: dict[str, Any] = {}

    def engine(name: str) -> Any:
        if name not in started:
            if name in RANKS:
                config = CONFIG.model_copy(update={"tensor_parallel_ranks": RANKS[name]})
                started[name] = Ranks("vllm", model, config, RANKS[name], LORA[name])
            else:
                started[name] = InProcess("transformers", model, CONFIG, LORA[name])
        return started[name]

    yield engine
    for name in RANKS.keys() & started.keys():
        started[name].close()


def adapter(model: Path, lora: LoRAConfig, seed: int) -> Weights:
    """As after some training."""
    adapted = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    add_adapters(adapted, lora)
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tensor.shape for name, tensor in adapter_weights(adapted, lambda tensor: tensor, torch.float32).items()}
    return {name: torch.randn(shape, generator=generator) / 5 for name, shape in shapes.items()}


def merged(model: Path, lora: LoRAConfig, weights: Weights, directory: Path) -> Path:
    """A model without adapters, and without anything of the engine: W + alpha / rank B A."""
    shutil.copytree(model, directory)
    whole = load_file(directory / "model.safetensors")
    for name, b in weights.items():
        if ".lora_B." in name:
            a = weights[name.replace("lora_B", "lora_A")]
            whole[name.removeprefix("base_model.model.").replace("lora_B.", "")] += lora.alpha / lora.rank * b @ a
    save_file(whole, directory / "model.safetensors", {"format": "pt"})
    return directory


def requests(model: Path) -> list[Request]:
    """Greedy ones; the last has full cache blocks, of 128 tokens, which could be used again."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [render_prompt(tokenizer, [{"role": "user", "content": question}]) for question in ("1+2", "what is 7*8?", "a")]
    return [Request(prompt, 0, None, 32) for prompt in [*prompts, (prompts[1] * 20)[:200]]]


def answers(engine: Any, asked: list[Request]) -> list[Drawn]:
    return sorted(engine.ask(draw, asked)[0], key=lambda one: one.position)


def load(backend: Any, weights: Weights) -> list[int]:
    """Numbers of the adapters that vLLM then has."""
    backend.load_adapter(weights, (backend.weight_version or 0) + 1)
    return sorted(backend._llm.llm_engine.list_loras()) if hasattr(backend, "_llm") else []


def objection(backend: Any, weights: Weights, scaling: float) -> str:
    """What `check_adapter` says of weights that need not be those that were loaded."""
    from engine.rollout.vllm_adapter import check_adapter

    try:
        backend._llm.apply_model(partial(check_adapter, weights=weights, scaling=scaling))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


# Mutations: no adapter in the requests; adapters that are not taken over; alpha left out.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LORA)
def test_an_adapter_answers_as_the_model_it_would_make(start: Callable[[str], Any], model: Path, tmp_path: Path, name: str) -> None:
    asked, lora, engine = requests(model), LORA[name], start(name)
    seen = []
    for number, seed in enumerate((1, 2, 1)):
        weights = adapter(model, lora, seed)
        assert all(len(held) == (name in RANKS) for held in engine.ask(load, weights))
        expected = answers(InProcess("transformers", merged(model, lora, weights, tmp_path / str(number)), CONFIG), asked)
        drawn = answers(engine, asked)
        assert [one.tokens for one in drawn] == [one.tokens for one in expected]
        for one, other in zip(drawn, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-4, rtol=0)
        seen.append([one.tokens for one in drawn])
    assert seen[0] != seen[1]
    assert seen[0] == seen[2]


def changed(weights: Weights, name: str, row: int, column: int) -> Weights:
    return {**weights, name: weights[name].index_put((torch.tensor(row), torch.tensor(column)), torch.tensor(9.0))}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RANKS)
def test_vllm_is_proved_to_hold_what_it_was_given(start: Callable[[str], Any], model: Path, name: str) -> None:
    engine, lora = start(name), LORA[name]
    weights, scaling = adapter(model, lora, 3), lora.alpha / lora.rank
    engine.ask(load, weights)
    everywhere = [True] * RANKS[name]
    last = [False, True][-len(everywhere) :]

    def found(weights: Weights, scaling: float = scaling) -> list[str]:
        return engine.ask(objection, weights, scaling)

    assert not any(found(weights))
    # Mutations: every rank compares the first rank's part; B without its scale; layers in another order, or none, given to vLLM.
    q, v, down = f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.v_proj", f"{LAYER}.mlp.down_proj"
    for tensor, row, column, where in (
        (f"{q}.lora_A.weight", -1, -1, everywhere),
        (f"{q}.lora_B.weight", -1, -1, last),
        (f"{v}.lora_B.weight", -1, -1, everywhere),  # the one key-value head lies on both ranks
        (f"{down}.lora_A.weight", -1, -1, last),
        (f"{down}.lora_B.weight", -1, -1, everywhere),
    ):
        said = found(changed(weights, tensor, row, column))
        assert [bool(text) for text in said] == where
        layer = tensor.removeprefix("base_model.model.").partition(".lora_")[0]
        assert all(text.endswith(f"that of {layer}") for text in said if text)
    assert all(found(weights, scaling + 1e-6))
    # Layers without an adapter are compared too, and so are adapters without a layer.
    said = found({tensor: value for tensor, value in weights.items() if not tensor.startswith(v)})
    assert all("that of model.layers.1.self_attn.v_proj" in text for text in said)
    said = found({**weights, **{tensor.replace("layers.1", "layers.7"): value for tensor, value in weights.items() if tensor.startswith(v)}})
    assert all("training.lora.target_modules" in text and "model.layers.7.self_attn.v_proj" in text for text in said)


def test_the_plain_backend_refuses_the_adapter_of_another_model(start: Callable[[str], Any], model: Path) -> None:
    # Mutation: copy what is there.
    with pytest.raises(ValueError, match=r"missing \['base_model\.model\.model\.layers\.0.*q_proj.lora_A\.weight'.* unknown \[\]"):
        start("plain").ask(load, adapter(model, NARROW.model_copy(update={"target_modules": ["v_proj"]}), 0))


def test_what_vllm_does_not_do_is_refused_before_it_starts(model: Path) -> None:
    from engine.rollout.vllm_adapter import adapter_arguments

    def arguments(lora: LoRAConfig, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Any]:
        return adapter_arguments(model, lora, dtype, torch.device(device))

    # Mutation: the largest rank below.
    assert [arguments(LoRAConfig(rank=rank))["max_lora_rank"] for rank in (1, 2, 16, 17, 512)] == [1, 8, 16, 32, 512]
    with pytest.raises(ValueError, match=r"training\.lora\.rank: vLLM takes at most 512, not 513"):
        arguments(LoRAConfig(rank=513))
    # Mutation: leave it to vLLM, which adapts the output head too: on a CPU it copies the head's B for every sample.
    assert "lm_head" not in arguments(WIDE)["lora_target_modules"]
    assert arguments(NARROW)["lora_target_modules"] == ["down_proj", "q_proj", "v_proj"]
    with pytest.raises(ValueError, match=r"model\.dtype: .*bfloat16"):
        arguments(WIDE, torch.float32, "cuda")
    assert arguments(WIDE, torch.bfloat16, "cuda")["enable_lora"]

"""Memory and cost of a recipe, from arithmetic alone, held against published parameter counts, figures by hand and published runs."""

import json
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.published import SHAPES
from engine.tokenizer import character_tokenizer
from tasks.architecture import CHARACTER_VOCABULARY, Architecture, architecture_of
from tasks.compose import compose
from tasks.cost import costs
from tasks.devices import DEVICES
from tasks.estimate import estimate
from tasks.memory import memory
from tasks.recipe_page import DIRECTORY, documented, pages

# Of the model cards, in billions.
PUBLISHED_PARAMETERS = {
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-1.7B": 1.72,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7.62,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.78,
    "Qwen/Qwen2.5-32B": 32.76,
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494,
    "Qwen/Qwen3-32B": 32.8,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 0.1345,
}


def published(name: str) -> Architecture:
    found = architecture_of(ModelConfig(path=name))
    assert found is not None
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_that_are_published(name: str) -> None:
    """Mutations: an output head where it is tied; no biases; a third of the gated feed-forward left out."""
    if "num_experts" in SHAPES[name]:
        # Mutation: count its experts as one feed-forward.
        assert architecture_of(ModelConfig(path=name)) is None
    else:
        assert published(name).parameters / 1e9 == pytest.approx(PUBLISHED_PARAMETERS[name], rel=2e-3)


def test_a_model_that_a_package_brings_is_known() -> None:
    assert architecture_of(compose(["recipe=smollm2_sums"]).model) == published("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_a_model_made_from_scratch_has_as_many_parameters_as_transformers_gives_it() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from engine.model import configuration

    model = compose(["recipe=grpo_tiny"]).model
    assert len(character_tokenizer(8)) == CHARACTER_VOCABULARY
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(configuration(model))
    found = architecture_of(model)
    assert found is not None
    assert found.parameters == sum(parameter.numel() for parameter in made.parameters())


def test_a_directory_says_what_its_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    (tmp_path / "mine").mkdir()
    values = {"num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
    more = {"vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 131072, "model_type": "qwen2"}
    (tmp_path / "mine" / "config.json").write_text(json.dumps(values | more))
    assert architecture_of(ModelConfig(path="mine")) == published("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert architecture_of(ModelConfig(path="mine")) is None
    assert architecture_of(ModelConfig(path="nobody/knows")) is None


SMALL = Architecture(layers=2, hidden=8, feed_forward=16, heads=4, key_value_heads=2, head_dim=4, vocabulary=32, tied=True, max_context_tokens=64)


def test_operations_by_hand() -> None:
    # A layer: q and o 8 x 16 each, k and v 8 x 8 each, three matrices 8 x 16: 768, and two norms of 8. The head: 32 x 8.
    assert SMALL.layer_parameters == 784
    # 10 tokens: 2 x (2 x 784 + 256) for the matrices, and 4 x 2 layers x 4 heads x 4 features x 5 tokens seen.
    assert SMALL.forward_operations(10, 5) == 10 * (2 * 1824 + 640)
    # Keys and values of two layers, two heads, four features; of 8 parts each has one head all the same.
    assert SMALL.cache_bytes(2) == 2 * 2 * 2 * 4 * 2
    assert SMALL.cache_bytes(2, 8) == 2 * 2 * 1 * 4 * 2


def of(*overrides: str):
    config = compose(["recipe=polaris_qwen3_4b", *overrides])
    found = architecture_of(config.model)
    assert found is not None
    return config, found, memory(config, found, DEVICES["h800"])


def test_memory_by_hand() -> None:
    _, model, found = of()
    # Weights, gradients and both moments in float32, over 32 ranks: on the host.
    assert (found.state, found.host_state) == (0.0, 16 * model.parameters / 32)
    assert found.rollout == 0.65 * 80e9
    # A token's cache: 36 layers x 8 heads x 128 x keys and values x 2 bytes. The longest samples are those of the evaluation.
    assert found.cached_samples == pytest.approx((52e9 - 2 * model.parameters) / 147456 / 91024)
    # The longest pass has stage 3: each layer keeps its input of 53,248 tokens; one of them is computed again.
    inside = 4 * 2560 + 2 * 4096 + 2048 + 3 * 9728
    assert found.training["activations"] == 53248 * 2 * (36 * 2560 + inside)
    assert set(found.phases()) == {"generate", "update", "synchronise"}


@pytest.mark.parametrize(
    ("override", "less"),
    [
        ("training.offload=true", "training.offload=false"),
        ("training.gradient_checkpointing=true", "training.gradient_checkpointing=false"),
        ("training.shard_gradients_every_pass=true", "training.shard_gradients_every_pass=false"),
        ("rollout.gpu_memory_fraction=0.3", "rollout.gpu_memory_fraction=0.6"),
        ("resources.ranks=64", "resources.ranks=16"),
        ("stages.stage_3.max_response_tokens=1000", "stages.stage_3.max_response_tokens=52224"),
    ],
)
def test_what_is_meant_to_save_memory_does(override: str, less: str) -> None:
    """Mutation: any of these settings left out of the arithmetic."""
    common = ["training.offload=false", "stages.stage_2.max_response_tokens=1000", "stages.stage_1.max_response_tokens=1000"]
    passes = [f"stages.stage_{number}.training.max_tokens_per_micro_batch=2024" for number in (1, 2, 3)]
    (_, _, saving), (_, _, wasteful) = of(*common, *passes, override), of(*common, *passes, less)
    assert saving.peak < wasteful.peak


def test_a_step_that_draws_computes_or_asks_for_more_costs_more() -> None:
    """Mutations: the reference's look left out; generations of a filter; the recomputation of checkpoints."""

    def seconds(*overrides: str) -> dict[str, float]:
        config, model, found = of(*overrides)
        return costs(config, model, DEVICES["h800"], found)[0].seconds

    plain = seconds()
    with_reference = seconds("stages.stage_1.algorithm.kl={coefficient: 0.1}")
    assert with_reference["log_prob"] == 2 * plain["log_prob"]
    filtered = seconds("stages.stage_1.groups={kind: filter, prompts_per_generation: 384}")
    assert filtered["generate"] > 1.5 * plain["generate"]
    assert filtered["update"] == plain["update"]
    assert seconds("training.gradient_checkpointing=false")["update"] < 0.8 * plain["update"]


# What was published of steps, and what the model of cost says of them (docs/recipes/README.md). Two of its constants come from the first line.
PUBLISHED_SECONDS = {
    ("polaris_r1_distill_7b", "h200", "generate"): 300,
    ("polaris_r1_distill_7b", "h200", "update"): 300,
    ("polaris_qwen3_4b", "h800", "step"): 0.33 * 3600,
}


@pytest.mark.parametrize(("recipe", "device", "phase"), PUBLISHED_SECONDS)
def test_published_steps_are_met_within_a_third(recipe: str, device: str, phase: str) -> None:
    cost = estimate(compose([f"recipe={recipe}"]), device).costs[0]
    found = {
        "step": cost.step_seconds,
        "generate": cost.seconds["generate"],
        "update": cost.seconds["update"] + cost.seconds["log_prob"],
    }[phase]
    assert 2 / 3 <= found / PUBLISHED_SECONDS[recipe, device, phase] <= 3 / 2


def test_every_recipe_for_gpus_fits_where_it_is_meant_to_run_and_has_a_page() -> None:
    for name in documented():
        assert estimate(compose([f"recipe={name}"])).fits, name
        assert (DIRECTORY / f"{name}.md").is_file(), name


def test_the_numbers_in_the_pages_are_those_of_the_recipes() -> None:
    """Mutation: change any setting of a stage, a device, or the arithmetic, without `make docs`."""
    found = pages()
    assert set(found) == {DIRECTORY / f"{name}.md" for name in (*documented(), "README")}
    for path, text in found.items():
        assert path.read_text(encoding="utf-8") == text, path


@pytest.mark.parametrize(("arguments", "said"), [({"device": "h80"}, "did you mean h800"), ({"mean_share": 0.0}, "above 0 and at most 1")])
def test_bad_input_is_named(arguments: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        estimate(compose(["recipe=grpo_tiny"]), **arguments)
    with pytest.raises(ValueError, match=r"model\.path: nothing is known here of the architecture of nobody/knows"):
        estimate(compose(["recipe=polaris_qwen3_4b", "model.path=nobody/knows"]))

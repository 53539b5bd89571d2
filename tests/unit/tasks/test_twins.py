"""A twin is the published recipe with other sizes: whatever else differs between the resolved configurations has to stand here, with its reason."""

import re
from typing import Any

import pytest

from tasks.compose import compose
from tasks.differences import leaves

SIZES = {
    r"name|description": "who it is",
    r"data\..*": "a task that a small model can learn, made on the spot",
    r"model\..*": "a small model with random weights",
    r"resources\..*": "two CPU cores",
    r"minimum_free_disk_gigabytes": "small checkpoints",
    r"stages\.sft\..*": "SFT that stands for the training which the published model had before",
    r"stages\.\w+\.(steps|prompts_per_step|max_prompt_tokens|max_response_tokens)": "fewer, and shorter",
    r"stages\.\w+\.groups\.prompts_per_generation|stages\.\w+\.truncated\.buffer_tokens": "in proportion to the two above",
    r"stages\.\w+\.training\.(max_tokens_per_micro_batch|optimizer\.learning_rate)": "what so few parameters take",
    r"evaluation\.(samples_per_prompt|max_response_tokens)": "fewer, and shorter",
    r"rollout\.(gpu_memory_fraction|max_concurrent_samples|tensor_parallel_ranks)": "two CPU cores",
    r"rollout\.max_log_prob_difference": "in float32 the two engines agree so closely that a run may be stopped when they do not",
    r"training\.(gradient_checkpointing|offload|tensor_parallel_ranks)": "nothing has to be saved",
}
FOUND_ON_THE_MODEL = {
    r"(stages\.stage_[123]|evaluation)\.sampling\.temperature": "what a search finds belongs to the model; the distances between stages stay",
    r"evaluation\.length_extension\.factor": "the twin's answers need no extension, and its model suffers from one",
}
"""Values that no model shares with another: `docs/recipes/README.md` has the measurements."""
TWINS = {"polaris_tiny": ("polaris_qwen3_4b", SIZES | FOUND_ON_THE_MODEL), "dapo_tiny": ("dapo_qwen2_5_32b", SIZES)}


def differences(twin: dict[str, Any], published: dict[str, Any]) -> set[str]:
    """Keys of settings that one has and the other has not, or has another value of."""
    ours, theirs, absent = dict(leaves(twin)), dict(leaves(published)), object()
    return {key for key in ours.keys() | theirs.keys() if ours.get(key, absent) != theirs.get(key, absent)}


def resolved(recipe: str, *overrides: str) -> dict[str, Any]:
    return compose([f"recipe={recipe}", *overrides]).model_dump(mode="json")


@pytest.mark.parametrize("twin", TWINS)
def test_a_twin_differs_in_sizes_alone(twin: str) -> None:
    published, allowed = TWINS[twin]
    found = differences(resolved(twin), resolved(published))
    assert {key for key in found if not any(re.fullmatch(pattern, key) for pattern in allowed)} == set()
    # What no longer differs has no reason to be allowed any more.
    assert {pattern for pattern in allowed if not any(re.fullmatch(pattern, key) for key in found)} - SIZES.keys() == set()


@pytest.mark.parametrize("twin", TWINS)
def test_a_twin_has_the_stages_in_the_same_order_after_its_sft(twin: str) -> None:
    # Mutation: write `sft` last in the twin's file.
    published, _ = TWINS[twin]
    assert list(compose([f"recipe={twin}"]).stages) == ["sft", *compose([f"recipe={published}"]).stages]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("stages.stage_1.algorithm.loss.clip_high=0.2", "stages.stage_1.algorithm.loss.clip_high"),
        ("stages.stage_2.groups.kind=keep", "stages.stage_2.groups.kind"),
        ("stages.stage_3.length_extension.factor=1.5", "stages.stage_3.length_extension"),
        ("stages.easy_1.threshold=0.8", "stages.easy_1.threshold"),
        ("stages.stage_1.updates_per_step=2", "stages.stage_1.updates_per_step"),
        ("stages.difficulty.keep.max_rate=1.0", "stages.difficulty.keep.max_rate"),
        ("stages.stage_1.samples_per_prompt=4", "stages.stage_1.samples_per_prompt"),
    ],
)
def test_another_rule_in_the_twin_is_found(override: str, key: str) -> None:
    # A list of sizes so wide that it lets rules through would be worth nothing.
    found = differences(resolved("polaris_tiny", override), resolved("polaris_qwen3_4b"))
    beyond = {name for name in found if not any(re.fullmatch(pattern, name) for pattern in SIZES | FOUND_ON_THE_MODEL)}
    assert any(name.startswith(key) for name in beyond)


def test_the_published_stages_rise_and_so_do_the_twins_in_proportion() -> None:
    """Caps of prompt and response, relative to the first stage: 1, 1.2, 1.3. Temperatures rise by 0.05."""
    for recipe in ("polaris_tiny", "polaris_qwen3_4b"):
        stages = compose([f"recipe={recipe}"]).rl_stages()
        caps = [stage.max_response_tokens / stages[0].max_response_tokens for stage in stages]
        assert caps == pytest.approx([1, 1.205, 1.308], abs=0.02)
        temperatures = [stage.sampling.temperature - stages[0].sampling.temperature for stage in stages]
        assert temperatures == pytest.approx([0, 0.05, 0.1])

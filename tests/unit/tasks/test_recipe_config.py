"""Rules between the parts of a recipe, and what the engine is given of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.config import RecipeConfig

TRAINING = {"optimizer": {"learning_rate": 1e-3}}


def sft(**values) -> dict:
    return {"kind": "sft", "steps": 1, "training": TRAINING, **values}


def rl(**values) -> dict:
    return {
        "kind": "rl",
        "steps": 1,
        "prompts_per_step": 8,
        "max_prompt_tokens": 40,
        "max_response_tokens": 64,
        "training": TRAINING,
        **values,
    }


def recipe(**values) -> RecipeConfig:
    plain = {
        "name": "r",
        "description": "d",
        "data": {"chain_sum": {}},
        "model": {"architecture": {}},
        "stages": {"sft": sft(), "rl": rl()},
        "evaluation": {"max_response_tokens": 64},
    }
    return RecipeConfig.model_validate({**plain, **values})


def test_context_is_the_longest_prompt_and_response() -> None:
    """Mutation: evaluation with the prompts of the last RL stage instead of the longest: 74 + 70 = 144 becomes 110."""
    assert recipe().engine().max_context_tokens == 40 + 64
    stages = {"a": rl(max_prompt_tokens=74, max_response_tokens=8), "b": rl()}
    assert recipe(stages=stages, evaluation={"max_response_tokens": 70}).engine().max_context_tokens == 74 + 70
    assert recipe(stages={"a": rl(max_response_tokens=100)}).engine().max_context_tokens == 140


def test_without_rl_an_evaluation_takes_prompts_as_long_as_conversations() -> None:
    assert recipe(stages={"sft": sft(max_tokens=100)}).engine().max_context_tokens == 164


def test_engine_gets_seed_dtype_resources_and_rollout() -> None:
    engine = recipe(
        seed=5,
        model={"architecture": {}, "dtype": "bfloat16"},
        resources={"ranks": 4},
        rollout={"max_concurrent_samples": 3},
        stages={"rl": rl()},
    ).engine()
    assert (engine.seed, engine.dtype, engine.resources.ranks, engine.rollout.max_concurrent_samples) == (5, "bfloat16", 4, 3)


@given(ranks=st.integers(1, 8), updates=st.integers(1, 4), groups=st.integers(1, 64))
def test_a_batch_is_taken_exactly_if_it_divides_and_a_suggested_one_is(ranks: int, updates: int, groups: int) -> None:
    """Mutation: check `prompts_per_step % ranks` alone; 4 prompts, 2 updates, 4 ranks then pass with half a prompt for each."""
    prompts = groups * updates

    def attempt(size: int) -> RecipeConfig:
        return recipe(stages={"rl": rl(prompts_per_step=size, updates_per_step=updates)}, resources={"ranks": ranks})

    if prompts % (updates * ranks) == 0:
        attempt(prompts)
        return
    with pytest.raises(ValidationError, match=r"stages\.rl\.prompts_per_step: ") as caught:
        attempt(prompts)
    message = str(caught.value)
    assert f"resources.ranks={ranks}" in message
    suggested = message.partition("use ")[2].partition(", or")[0].split(" or ")
    for size in suggested:
        attempt(int(size))
    assert min(abs(int(size) - prompts) for size in suggested) < updates * ranks


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"stages": {"sft": sft(max_tokens=257)}}, "stages.sft.max_tokens"),
        ({"stages": {"rl": rl(max_response_tokens=217)}}, "stages.rl.max_response_tokens"),
        ({"evaluation": {"max_response_tokens": 217}}, "evaluation.max_response_tokens"),
        ({"stages": {"sft": sft(rows_per_step=97)}}, "stages.sft.rows_per_step"),
        ({"data": {"train_file": "a.parquet"}}, "data.sft_file"),
        ({"evaluation_reward": {"shuffle": True}}, "evaluation_reward.shuffle"),
        (
            {
                "stages": {"rl": rl(algorithm={"kl": {"coefficient": 0.1, "reset_reference_every_steps": 5}})},
                "training": {"lora": {}},
            },
            "stages.rl.algorithm.kl.reset_reference_every_steps",
        ),
        (
            {
                "stages": {"rl": rl(algorithm={"advantage": {"estimator": "remax"}})},
                "annotators": {"judge": {"worker": "reward_model", "reward_weight": 1.0}},
            },
            "annotators.judge.reward_weight",
        ),
        ({"resources": {"roles": {"critics": "main"}}}, "resources.roles.critics"),
        ({"annotators": {"critic": {"worker": "reward_model"}}}, "annotators.critic"),
        ({"rollout": {"tensor_parallel_ranks": 3}}, "rollout.tensor_parallel_ranks"),
        ({"training": {"shard_ranks": 3}}, "training.shard_ranks"),
        ({"rollout": {"changed_only": True}, "training": {"lora": {"rank": 4}}}, "rollout.changed_only"),
        ({"training": {"backend": "tensor_parallel", "tensor_parallel_ranks": 3}}, "training.tensor_parallel_ranks"),
    ],
)
def test_broken_rules_are_named_by_key(values: dict, key: str) -> None:
    with pytest.raises(ValidationError, match=f"{key}: "):
        recipe(**values)


@pytest.mark.parametrize(
    ("rejection", "bound", "legal"),
    [
        ({}, 1e-3, False),
        ({}, 0.69, False),  # ratios of 0.5016 .. 1.994, and 0.5 .. 2 are kept
        ({}, 0.70, True),
        ({}, None, True),
        ({"low": 0.0, "high": 1.01}, 0.02, True),  # Mutation: ask for both bounds to be reached.
        ({"level": "sequence"}, 1e-3, True),  # A product of many tokens' ratios.
    ],
)
def test_a_rejection_that_could_never_act_is_refused(rejection: dict, bound: float | None, legal: bool) -> None:
    def attempt() -> None:
        recipe(stages={"rl": rl(algorithm={"off_policy": {"rejection": rejection}})}, rollout={"max_log_prob_difference": bound})

    if legal:
        attempt()
        return
    with pytest.raises(ValidationError, match=r"stages\.rl\.algorithm\.off_policy\.rejection: rollout\.max_log_prob_difference="):
        attempt()


def test_exactly_the_context_fits() -> None:
    """Mutation: `>=` for `>` in `_tokens_fit`."""
    fits = recipe(stages={"sft": sft(max_tokens=256), "rl": rl(max_response_tokens=216)}, evaluation={"max_response_tokens": 216})
    assert fits.stages["rl"].max_prompt_tokens + fits.stages["rl"].max_response_tokens == fits.model.architecture.max_context_tokens


def test_context_of_a_model_from_elsewhere_is_its_own_business() -> None:
    assert recipe(model={"path": "some/model"}, evaluation={"max_response_tokens": 10_000}).evaluation.max_response_tokens == 10_000


def test_legal_though_unusual() -> None:
    assert list(recipe(stages={"rl": rl()}).stages) == ["rl"]
    assert recipe(stages={"sft": sft()}, data={"train_file": "a.parquet", "sft_file": "b.jsonl"}).data.train_file == "a.parquet"


def test_order_of_stages_counts_in_the_digest() -> None:
    """Mutation: inherit `digest`, whose canonical JSON sorts keys."""
    there, back = recipe(stages={"a": rl(), "b": sft()}), recipe(stages={"b": sft(), "a": rl()})
    assert there.digest() != back.digest()


@pytest.mark.parametrize("name", ["", "Two words", "a/b", "9lives", "..", "a-b"])
def test_names_that_would_not_make_a_directory_or_a_metric(name: str) -> None:
    with pytest.raises(ValidationError, match="should match pattern"):
        recipe(name=name)
    with pytest.raises(ValidationError, match="should match pattern"):
        recipe(stages={name: rl()})

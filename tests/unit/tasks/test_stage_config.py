"""How stages refer to each other, and what a kind of stage has to say."""

from typing import Any

import pytest
from pydantic import ValidationError

from tasks.config import RecipeConfig
from tasks.stage_config import GIVEN, KINDS, REFERENCES, DifficultyStageConfig

TRAINING = {"optimizer": {"learning_rate": 1e-3}}
CAPS = {"max_prompt_tokens": 40, "max_response_tokens": 64}


def rl(**values: Any) -> dict[str, Any]:
    return {"kind": "rl", "steps": 2, "prompts_per_step": 8, **CAPS, "training": TRAINING, **values}


def difficulty(**values: Any) -> dict[str, Any]:
    return {"kind": "difficulty", **CAPS, **values}


def drop(*scores_of: str, **values: Any) -> dict[str, Any]:
    return {"kind": "drop_easy", "scores_of": list(scores_of), **values}


def temperature(**values: Any) -> dict[str, Any]:
    return {"kind": "temperature_search", "grid": {"low": 0.5, "high": 1.0}, **CAPS, **values}


MATCH = {"rule": "match_diversity", "matches": "hot"}


def recipe(**stages: dict[str, Any]) -> RecipeConfig:
    plain = {"name": "r", "description": "d", "data": {"chain_sum": {}}, "model": {"architecture": {}}, "evaluation": {"max_response_tokens": 64}}
    return RecipeConfig.model_validate({**plain, "stages": stages})


def refused(**stages: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        recipe(**stages)
    return str(caught.value)


def test_stages_take_from_those_before_them() -> None:
    found = recipe(rate=difficulty(), one=rl(prompts="rate"), easy=drop("one", prompts="rate"), two=rl(prompts="easy"))
    assert found.stages["two"].prompts == "easy"
    assert found.max_context_tokens() == 104


def test_a_search_is_matched_by_a_later_one_and_taken_by_stages_after_it() -> None:
    fixed = {"prefix_length": 9}
    found = recipe(
        hot=temperature(diversity=fixed),
        one=rl(temperature_from="hot"),
        again=temperature(**MATCH, diversity=fixed),
        two=rl(temperature_from="again"),
    )
    assert found.stages["again"].matches == "hot"
    # A prefix length that is left out is the one that was used there.
    recipe(hot=temperature(diversity=fixed), again=temperature(**MATCH))


def test_a_length_extension_reaches_beyond_the_models_context() -> None:
    # The model has 256 positions. Mutation: of one stage's extension all others think that it is theirs.
    yarn = {"factor": 1.5, "attention_factor": 1.0}
    assert recipe(one=rl(max_response_tokens=300, length_extension=yarn)).max_context_tokens() == 340
    assert "or set length_extension" in refused(one=rl(max_response_tokens=300))
    said = refused(one=rl(max_response_tokens=300, length_extension=yarn), two=rl(max_response_tokens=300))
    assert "stages.two.max_response_tokens" in said
    assert "stages.one.max_response_tokens" not in said


# Mutations: look at all stages instead of those before; leave the kind out of the comparison.
@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ({"one": rl(prompts="rat"), "rate": difficulty()}, "stages.one.prompts: there is no stage rat; no stage before it has prompts"),
        (
            {"first": difficulty(), "one": rl(prompts="rate"), "rate": difficulty()},
            "stages.one.prompts: stage rate does not come before one; stages before it with prompts: first",
        ),
        ({"one": rl(prompts="one")}, "stages.one.prompts: stage one does not come before one; no stage before it has prompts"),
        ({"one": rl(), "two": rl(prompts="one")}, "stages.two.prompts: stage one, of kind rl, has no prompts; no stage before it has prompts"),
        (
            {"rate": difficulty(), "one": rl(), "easy": drop("rate", "one")},
            "stages.easy.scores_of: stage rate, of kind difficulty, has no scores; stages before it with scores: one",
        ),
        ({"rate": difficulty(prompts="later")}, "stages.rate.prompts: there is no stage later"),
        ({"one": rl(), "easy": drop("one", prompts="one")}, "stages.easy.prompts: stage one, of kind rl, has no prompts"),
        ({"one": rl(), "easy": drop("one", "one")}, "scores_of names one more than once"),
        ({"one": rl(temperature_from="hot")}, "stages.one.temperature_from: there is no stage hot; no stage before it has temperature"),
        (
            {"hot": temperature(), "rate": difficulty(), "one": rl(temperature_from="rate")},
            "stages.one.temperature_from: stage rate, of kind difficulty, has no temperature; stages before it with temperature: hot",
        ),
        ({"again": temperature(**MATCH), "hot": temperature()}, "stages.again.matches: stage hot does not come before again"),
        (
            {"hot": temperature(), "again": temperature(samples_per_prompt=4, **MATCH)},
            "stages.again.samples_per_prompt: 4 is not what stages.hot.samples_per_prompt is (16), so that diversities do not compare",
        ),
        (
            {"rate": difficulty(), "hot": temperature(), "again": temperature(prompts="rate", **MATCH)},
            "stages.again.prompts: rate is not what stages.hot.prompts is (null)",
        ),
        (
            {"hot": temperature(), "again": temperature(diversity={"unit": "words"}, **MATCH)},
            "stages.again.diversity.unit: words is not what stages.hot.diversity.unit is (tokens)",
        ),
        (
            {"hot": temperature(), "again": temperature(diversity={"prefix_length": 9}, **MATCH)},
            "stages.again.diversity.prefix_length: 9 is not what stages.hot.diversity.prefix_length is (null)",
        ),
        ({"hot": temperature(max_response_tokens=217)}, "stages.hot.max_response_tokens: stages.hot.max_prompt_tokens=40 plus 217 tokens do not fit"),
        ({"one": rl(steps=2), "easy": drop("one", min_visits=3)}, "stages.easy.min_visits: 3 visits are more than the 2 steps of one"),
        # Two evaluations of one name. Mutation: allow it.
        ({"base": rl()}, "stages.base: evaluations of the weights that a recipe starts from are called base"),
        ({"rate": difficulty(reward={"shuffle": True})}, "stages.rate.reward.shuffle: shuffled scores measure nothing"),
        ({"rate": difficulty(reward={"on_failure": "exclude"})}, "stages.rate.reward.on_failure: an accuracy is over all samples"),
        (
            {"rate": difficulty(max_response_tokens=217)},
            "stages.rate.max_response_tokens: stages.rate.max_prompt_tokens=40 plus 217 tokens do not fit",
        ),
    ],
)
def test_what_contradicts_itself_is_named_with_what_there_is(stages: dict[str, dict[str, Any]], said: str) -> None:
    assert said in refused(**stages)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"keep": {"min_rate": 0.6, "max_rate": 0.5}}, "max_rate (0.5) is below min_rate (0.6), so that no prompt would be kept"),
        # Mutation: compare with k / 8 whatever samples_per_prompt is; 3/8 lies in there.
        ({"samples_per_prompt": 4, "keep": {"min_rate": 0.3, "max_rate": 0.45}}, "no pass rate of samples_per_prompt=4 lies between min_rate=0.3"),
    ],
)
def test_a_range_in_which_no_rate_lies_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DifficultyStageConfig.model_validate(difficulty(**values))
    assert said in str(caught.value)


def test_the_default_leaves_out_eight_of_eight() -> None:
    keep = DifficultyStageConfig.model_validate(difficulty()).keep
    assert [k for k in range(9) if keep.min_rate <= k / 8 <= keep.max_rate] == list(range(8))


def test_what_is_referred_to_is_given_by_some_kind() -> None:
    assert set(REFERENCES.values()) == {kind.gives for kind in KINDS.values()} - {None} == set(GIVEN)


def test_every_kind_of_stage_has_an_entry_and_a_function() -> None:
    from typing import get_args

    from tasks import schema
    from tasks.kinds import RUNNERS

    kinds = {schema.tag(model) for model in schema.models(schema.at(["stages", "any"]))}
    assert kinds == set(KINDS) == set(RUNNERS)
    assert get_args(RecipeConfig.model_fields["stages"].annotation)

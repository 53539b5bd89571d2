"""Which stage `almanac difficulty` means, and what a filter of a run's prompts asks of the run."""

from pathlib import Path

import pytest

from tasks.compose import compose
from tasks.lineage import Lineage
from tasks.record import RunRecord, StageRecord
from tasks.stage import after_others, evaluated_after, main, with_stage

RATE = "stages.rate={kind: difficulty, max_prompt_tokens: 40, max_response_tokens: 20, samples_per_prompt: 3}"
RATE_OF_RATE = "stages.again={kind: difficulty, max_prompt_tokens: 40, max_response_tokens: 20, prompts: rate}"


def test_a_recipe_without_a_rating_asks_as_its_first_rl_stage_does() -> None:
    settings = ["recipe=grpo_tiny", "stages.rl.reward.shuffle=true", "stages.rl.reward.on_failure=exclude", "stages.rl.sampling.temperature=0.7"]
    config, name = with_stage(compose(settings), "difficulty", None)
    stage, first = config.stages[name], config.stages["rl"]
    assert stage.kind == "difficulty"
    assert first.kind == "rl"
    assert (stage.max_prompt_tokens, stage.max_response_tokens, stage.sampling) == (40, 64, first.sampling)
    assert stage.reward.by_data_source == first.reward.by_data_source
    # Mutation: the reward as it is, which a rating refuses.
    assert (stage.reward.shuffle, stage.reward.on_failure) == (False, "zero")


def test_the_recipes_own_rating_goes_first() -> None:
    config = compose(["recipe=grpo_tiny", RATE])
    assert with_stage(config, "difficulty", None) == (config, "rate")
    assert with_stage(config, "difficulty", "rate") == (config, "rate")


def test_a_search_asks_as_the_first_rl_stage_does_but_for_the_temperature() -> None:
    config, name = with_stage(compose(["recipe=grpo_tiny", "stages.rl.sampling.temperature=0.7"]), "temperature_search", None)
    stage = config.stages[name]
    assert stage.kind == "temperature_search"
    assert stage.grid.values() == [0.6, 0.8, 1.0, 1.2, 1.4]
    assert (stage.max_prompt_tokens, stage.max_response_tokens) == (40, 64)


@pytest.mark.parametrize(
    ("overrides", "name", "said"),
    [
        ([RATE], "rl", "no stage rl of kind difficulty; it has: rate"),
        ([RATE, RATE_OF_RATE], "again", r"stages\.again\.prompts=rate is for a run of the whole recipe"),
        (["~stages.rl"], None, "no stage of kind difficulty or rl"),
    ],
)
def test_what_cannot_be_asked_is_refused(overrides: list[str], name: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        with_stage(compose(["recipe=grpo_tiny", *overrides]), "difficulty", name)


def test_a_stage_alone_has_to_be_the_recipes() -> None:
    with pytest.raises(ValueError, match="recipe grpo_tiny has no stage r1; it has: sft, rl"):
        after_others(compose(["recipe=grpo_tiny"]), "r1", "r", lambda event: None)


def test_what_is_evaluated_alone_has_to_train() -> None:
    rated = compose(["recipe=grpo_tiny", RATE])
    for label in ("rate", "r1"):
        with pytest.raises(ValueError, match=f"nothing of recipe grpo_tiny is evaluated as {label}; there are: base, sft, rl"):
            evaluated_after(rated, label, "r", lambda event: None)


@pytest.mark.parametrize("arguments", [["recipe=grpo_tiny"], ["recipe=grpo_tiny", "stage=rl", "evaluate=rl"]])
def test_one_thing_is_asked_for_at_a_time(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="stage=NAME or evaluate=NAME once"):
        main(arguments)


def test_records_of_earlier_versions_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    old = RunRecord(
        run="tiny-20260101-000000",
        status="finished",
        recipe="tiny",
        seed=0,
        stages=[StageRecord(name="rl", kind="rl", steps_planned=1)],
        lineage=Lineage(configuration_digest="0", seed=0),
    )
    text = old.model_dump(mode="json")
    for added in ("results", "output", "reused_from"):
        del text["stages"][0][added]
    assert RunRecord.model_validate(text) == old

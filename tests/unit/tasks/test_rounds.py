"""Nights of one part of a recipe each: which comes next, what it is compared with, and what its page says."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic_runs import eight_seeds, in_nights, synthetic_run

from tasks import night_report, nights, reference, rounds
from tasks.compose import compose
from tasks.nights import NightRecord, Part

POLARIS = compose(["recipe=polaris_tiny"])
SFT, RL = Part(begun="20261201-020000", stages=["sft"], number=1, of=2), Part(begun="20261201-020000", stages=["rl"], number=2, of=2)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture
def known() -> reference.Reference:
    return eight_seeds()


def night(known: reference.Reference, number: int, part: Part | None, shift: float = 0.0) -> NightRecord:
    """Of the rl part, the sft stage lay ready: its accuracy is in the log, its steps are not."""
    run = synthetic_run(in_nights(1000 + number), f"small-20261130-0{number:05}", shift={"reward/mean": shift}, log_of=part and part.stages)
    if part is not None:
        for stage in run.stages:
            stage.reused_from = None if stage.name in part.stages else "before"
    judged = nights.judged(f"202612{number:02}-020000", known, in_nights(1000 + number), "finished", run, None, 60.0, part)
    return nights.record(f"202612{number:02}-020000", 3600.0, [judged])


@pytest.mark.parametrize(
    ("recipe", "more", "expected"),
    [
        ("polaris_tiny", [], [["sft"], ["difficulty", "stage_1"], ["easy_1", "stage_2"], ["easy_2", "stage_3"]]),
        ("grpo_tiny", ["+stages.last={kind: drop_easy, scores_of: [rl], threshold: 0.9}"], [["sft"], ["rl", "last"]]),
        ("grpo_tiny", ["~stages.rl"], [["sft"]]),
    ],
)
def test_a_part_ends_with_a_stage_that_trains_and_every_stage_is_in_one(recipe: str, more: list[str], expected: list[list[str]]) -> None:
    """Mutation: a part of its own for what stands behind the last stage that trains."""
    found = compose([f"recipe={recipe}", *more])
    assert rounds.parts(found) == expected
    assert [name for part in rounds.parts(found) for name in part] == list(found.stages)


@given(outcomes=st.lists(st.sampled_from(["finished", "finished", "stopped", "not started", "failed", "killed"]), max_size=10))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
def test_parts_follow_each_other_whatever_becomes_of_nights(
    known: reference.Reference, outcomes: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Nights of its own for each example.
        patch.setenv("ALMANAC_ROOT", str(tmp_path_factory.mktemp("example")))
        identity, before = reference.digest(known), None
        for number, outcome in enumerate(outcomes):
            name = f"202612{number + 1:02}-020000"
            part = rounds.next_part("small", identity, POLARIS, name)
            assert part.stages == rounds.parts(POLARIS)[part.number - 1]
            match before:
                case (earlier, "finished") if earlier.number < earlier.of:
                    # Mutation: a new seed for every part; what the earlier ones have left is then not taken.
                    assert (part.number, part.begun) == (earlier.number + 1, earlier.begun)
                case (earlier, "not started") if earlier.number == 1:
                    # Mutation: try it again; it is then no fresh run, and takes what earlier runs have left.
                    assert (part.number, part.begun) == (1, name)
                case (earlier, "stopped" | "not started"):
                    # Mutation: go on as if it were done; its verdict never comes.
                    assert part == earlier
                case _:
                    # Mutation: go on after a failure.
                    assert (part.number, part.begun) == (1, name)
            if outcome != "killed":
                told = nights.not_started(known, in_nights(9), "no time", part).model_copy(update={"outcome": outcome})
                nights.record(name, 10.0, [told])
                before = part, outcome
        # Another reference, another round.
        assert rounds.next_part("small", "another", POLARIS, "20261230-020000").number == 1


def test_a_part_is_judged_by_its_own_stages(known: reference.Reference) -> None:
    first, second = night(known, 1, SFT).recipes[0], night(known, 2, RL).recipes[0]
    assert {verdict.stage for verdict in first.verdicts} == set(first.summary) == {"base", "sft"}
    # Mutation: judge whatever the log has; accuracies of what lay ready are then counted again, and learnt from.
    assert {verdict.stage for verdict in second.verdicts} == set(second.summary) == {"rl"}
    # Mutation: compare with all of the reference; every night is then insufficient.
    assert (first.word, second.word) == ("within", "within")
    assert night(known, 3, RL, shift=-0.6).worse
    # What was made again is judged too.
    again = synthetic_run(in_nights(7), "small-20261130-700000")
    assert {v.stage for v in nights.judged("20261207-020000", known, in_nights(7), "finished", again, None, 1.0, RL).verdicts} == {"sft", "rl"}


def test_like_is_compared_with_like(known: reference.Reference) -> None:
    for number, part in enumerate((SFT, RL, None), start=1):
        night(known, number, part)
    identity, later = reference.digest(known), "20261220-020000"
    # Mutation: all nights; the newest seven are then of other stages.
    assert [len(nights.past("small", identity, later, stages)) for stages in (["sft"], ["rl"], ["base", "rl"])] == [2, 2, 3]
    goods = [nights.last_good("small", later, part) for part in (SFT, RL, None)]
    assert [good and good[0].night for good in goods] == ["20261201-020000", "20261202-020000", "20261203-020000"]


def test_seconds_of_the_parts_are_those_of_the_run(known: reference.Reference) -> None:
    assert nights.expected_seconds(known, SFT) + nights.expected_seconds(known, RL) == pytest.approx(nights.expected_seconds(known))
    # 24 steps each, of the same phases.
    assert nights.expected_seconds(known, SFT) == pytest.approx(known.seconds / 2)


def test_pages_say_which_part_it_was(known: reference.Reference) -> None:
    record = night(known, 2, RL)
    page = night_report.to_html(record, [known])
    assert "finished, part 2 of 2 (to rl)" in page
    assert "of the round that began in night 20261201-020000" in page

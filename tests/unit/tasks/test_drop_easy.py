"""Which prompts a filter of easy ones drops, by the log that stages leave."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.events import PromptsScored
from tasks.drop_easy import append, begin_log, easy, estimates, read, results

EIGHTHS = st.sampled_from([k / 8 for k in range(9)])
VISITS = st.lists(st.dictionaries(st.sampled_from("abcdefg"), EIGHTHS, min_size=1), min_size=1, max_size=6)
"""Steps, each with what the prompts that it visited scored."""


def step(number: int, outcomes: dict[str, float], stage: str = "rl") -> PromptsScored:
    return PromptsScored(stage=stage, step=number, prompts=list(outcomes), outcomes=list(outcomes.values()), samples=[8] * len(outcomes))


def steps(visits: list[dict[str, float]]) -> list[PromptsScored]:
    return [step(number, outcomes) for number, outcomes in enumerate(visits, start=1)]


# Mutations: threshold 0.5; `>=`; another key than the prompt's id; latest instead of mean, and the reverse; the first visit instead of the last;
# min_visits left out.
@given(VISITS, st.sampled_from(["mean", "latest"]), st.sampled_from([0.0, 0.5, 0.875, 0.9]), st.integers(1, 3))
def test_dropped_are_exactly_those_whose_estimate_is_above_the_threshold(visits: list, estimator: str, threshold: float, min_visits: int) -> None:
    dropped = easy(estimates(steps(visits), estimator), threshold, min_visits)  # type: ignore[arg-type]
    for prompt in "abcdefg":
        scores = [outcomes[prompt] for outcomes in visits if prompt in outcomes]
        if len(scores) < min_visits:
            assert prompt not in dropped  # Never visited ones are among these.
            continue
        estimate = sum(scores) / len(scores) if estimator == "mean" else scores[-1]
        assert (prompt in dropped) == (estimate > threshold)


def test_one_visit_drops_eight_of_eight_alone_and_two_visits_fifteen_of_sixteen() -> None:
    """As in POLARIS, with threshold 0.9. Mutation: 0.85 drops 7/8 after one visit."""
    once = estimates(steps([{"all": 1.0, "seven": 0.875}]), "mean")
    assert easy(once, 0.9, 1) == {"all"}
    twice = estimates(steps([{"all": 1.0, "seven": 0.875, "late": 0.5}, {"all": 0.875, "seven": 0.875, "late": 1.0}]), "mean")
    assert twice["all"].outcome == 15 / 16
    assert easy(twice, 0.9, 1) == {"all"}
    latest = estimates(steps([{"all": 1.0, "seven": 0.875, "late": 0.5}, {"all": 0.875, "seven": 0.875, "late": 1.0}]), "latest")
    assert easy(latest, 0.9, 1) == {"late"}


def test_a_mean_of_nine_tenths_is_not_above_it() -> None:
    # Nine visits of 1 and one of 0; a plain sum of 0.1 ten times would be 0.9999999999999999. Mutation: sum(found) / len(found) with such outcomes.
    assert easy(estimates(steps([{"a": 0.9}] * 10), "mean"), 0.9, 1) == set()


def test_a_log_comes_back_as_it_was_written_and_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "output" / "scores.jsonl"
    written = steps([{"a": 1.0, "b": 0.25}, {"c": 0.0}])
    for _ in range(2):
        # A stage that was killed after its first step and is run again. Mutation: begin_log keeps what is there; a step then stands there twice.
        begin_log(path)
        append(path, written[0])
    append(path, written[1])
    assert read(path) == written
    assert json.loads(path.read_text().splitlines()[0]) == {
        "stage": "rl",
        "step": 1,
        "prompts": ["a", "b"],
        "outcomes": [1.0, 0.25],
        "samples": [8, 8],
    }


@pytest.mark.parametrize(
    ("spoil", "said"), [(lambda lines: lines[1:], "is of step 2, not 1"), (lambda lines: [lines[0], *lines], "is of step 1, not 2")]
)
def test_a_log_with_a_step_missing_or_twice_is_refused(tmp_path: Path, spoil: object, said: str) -> None:
    path = tmp_path / "scores.jsonl"
    begin_log(path)
    for event in steps([{"a": 1.0}, {"b": 1.0}]):
        append(path, event)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(spoil(lines)))  # type: ignore[operator]
    with pytest.raises(ValueError, match=said):
        read(path)
    path.write_text("".join(lines)[:-9])
    with pytest.raises(ValueError, match="line 2: not a step's scores"):
        read(path)


def test_results_count_the_filtered_prompts_only() -> None:
    # x was dropped before. Mutation: len(dropped).
    found = estimates(steps([{"a": 1.0, "b": 0.5, "x": 1.0}]), "mean")
    assert results(["a", "b", "c"], found, easy(found, 0.9, 1)) == {"prompts": 3, "visited": 2, "dropped": 1, "kept": 2}

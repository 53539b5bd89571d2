"""What each reward scores, by hand; and sums of several."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import RewardConfig, RewardRunnerConfig
from engine.prompts import Prompt
from engine.rewards.format import follows_format
from engine.rewards.length import length
from engine.rewards.multiple_choice import multiple_choice
from engine.rewards.overlong import overlong
from engine.rewards.regex import regex
from engine.rewards.rules import rules
from engine.rewards.runner import RewardError
from engine.rewards.scoring import Scoring

RUNNER = RewardRunnerConfig(processes=1)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think> b", 1.0),
        (" \n<think>a\nb</think>\n\nc\nd ", 1.0),  # Mutation: `.` without DOTALL.
        ("<think></think>b", 1.0),
        ("<think>a</think>", 0.0),  # Mutation: an answer of nothing.
        ("<think>a</think> \n ", 0.0),
        ("<think>a", 0.0),
        ("a</think> b", 0.0),
        ("so: <think>a</think> b", 0.0),  # Mutation: search for fullmatch.
        ("<think>a</think> b <think>c</think> d", 0.0),  # Mutation: `.*` for what is no tag.
        ("<think>a<think>b</think></think> c", 0.0),
        ("", 0.0),
    ],
)
def test_format(response: str, score: float) -> None:
    assert follows_format(response) == score


def test_format_of_ones_own() -> None:
    assert follows_format("<answer>4\n</answer>\n", r"<answer>.*</answer>") == 1.0
    assert follows_format("<answer>4</answer>!", r"<answer>.*</answer>") == 0.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"\boxed{B}", 1.0),
        (r"Answer: A? No: \boxed{(b)}", 1.0),  # the box goes first, small letters count in it
        (r"The answer is B. \boxed{42}", 0.0),  # a box with something else chooses nothing
        ("The answer is (B).", 1.0),
        ("The answer is A. No, the answer is **B**", 1.0),  # Mutation: the first.
        ("answer: B", 1.0),
        ("Answer B", 1.0),
        ("The answer is a hard one", 0.0),  # Mutation: small letters: an article is a choice.
        ("The answer is Berlin", 0.0),  # Mutation: without \b.
        ("(B)", 1.0),
        (" b. ", 1.0),
        ("B or C", 0.0),
        ("A, since B is wrong", 0.0),
        ("<think>The answer is B</think> The answer is A", 0.0),
        ("<think>The answer is A</think> B", 1.0),
        ("", 0.0),
    ],
)
def test_multiple_choice(response: str, score: float) -> None:
    for truth in ("B", "b", "(B)", " B."):
        assert multiple_choice(response, truth) == score


@pytest.mark.parametrize("truth", ["", "12", "AB", "B or C"])
def test_multiple_choice_needs_a_letter(truth: str) -> None:
    with pytest.raises(ValueError, match="needs a letter as ground truth"):
        multiple_choice("B", truth)


@pytest.mark.parametrize(
    ("response", "pattern", "equals", "score"),
    [
        ("order 12", r"order \d+", False, 1.0),
        ("order x", r"order \d+", False, 0.0),
        ("<think>order 12</think> no", r"order \d+", False, 0.0),
        ("4, no: 5 ", r"\d", True, 1.0),  # Mutation: the first match.
        ("5, no: 4", r"\d", True, 0.0),
        ("it is 5", r"it is (\d)", True, 1.0),  # Mutation: the whole match where there is a group.
        ("it is", r"it is ?(\d)?", True, 0.0),  # a group that took no part
        ("", r"\d", True, 0.0),
    ],
)
def test_regex(response: str, pattern: str, equals: bool, score: float) -> None:
    assert regex(response, "5", pattern, equals) == score


@pytest.mark.parametrize(
    ("response", "score", "greets", "promises"),
    [
        ("Hello. It comes soon.", 1.0, 1.0, 1.0),
        ("HELLO. I GUARANTEE it.", 0.25, 1.0, 0.0),
        ("It comes soon.", 0.75, 0.0, 1.0),  # Mutation: rules without their weights: 0.5.
        ("I guarantee it.", 0.0, 0.0, 0.0),
        ("<think>hello, guarantee</think> It comes soon.", 0.75, 0.0, 1.0),
    ],
)
def test_rules(response: str, score: float, greets: float, promises: float) -> None:
    given = [
        {"name": "greets", "pattern": "^hello", "must": True, "weight": 1.0},
        {"name": "promises", "pattern": "guarantee", "must": False, "weight": 3.0},
    ]
    assert rules(response.replace("</think> ", "</think>"), given) == {"score": score, "greets": greets, "promises": promises}


def test_rules_can_tell_small_from_capital_letters() -> None:
    shouts = [{"name": "shouts", "pattern": "[A-Z]{4}", "must": False, "weight": 1.0}]
    assert [rules(text, shouts, ignore_case)["score"] for text in ("loud", "LOUD") for ignore_case in (False, True)] == [1.0, 0.0, 0.0, 0.0]


def test_length() -> None:
    assert [length(tokens, target_tokens=100) for tokens in (0, 50, 100, 125, 200, 500)] == [0.0, 0.5, 1.0, 0.75, 0.0, 0.0]
    # Mutations: < for <=, on either side.
    assert [length(tokens, min_tokens=10, max_tokens=20) for tokens in (9, 10, 20, 21)] == [0.0, 1.0, 1.0, 0.0]
    assert [length(tokens, max_tokens=20) for tokens in (0, 21)] == [1.0, 0.0]
    assert [length(tokens, min_tokens=10) for tokens in (9, 1000)] == [0.0, 1.0]


def test_overlong() -> None:
    # Equation 13 of DAPO with L_max = 20480 and L_cache = 4096: 0 up to 16384; (16384 - 18432) / 4096 = -0.5; -1 from the cap on.
    assert [overlong(tokens, 20480, 4096) for tokens in (0, 16384, 18432, 20480, 20481)] == [0.0, 0.0, -0.5, -1.0, -1.0]


@given(st.integers(0, 300), st.integers(1, 100), st.integers(0, 100))
def test_overlong_falls_and_stays_within_its_bounds(tokens: int, buffer: int, more: int) -> None:
    values = [overlong(length, buffer + more, buffer) for length in (tokens, tokens + 1)]
    assert -1 <= values[1] <= values[0] <= 0
    assert values[0] - values[1] <= 1 / buffer + 1e-9


@given(st.text(max_size=80))
def test_whatever_a_response_is_the_scores_stay_within_0_and_1(response: str) -> None:
    for score in (follows_format(response), multiple_choice(response, "A"), regex(response, "5", r"\w+", True)):
        assert score in (0.0, 1.0)


def prompt(data_source: str, ground_truth: str = "5") -> Prompt:
    return Prompt(id="id", index=3, messages=({"role": "user", "content": "?"},), data_source=data_source, ground_truth=ground_truth)


SUM: dict[str, Any] = {
    "answer": {"function": "regex", "pattern": r"\d+", "equals_ground_truth": True, "weight": 2.0},
    "form": {"function": "format", "weight": 0.5},
    "long": {"function": "overlong", "max_tokens": 10, "buffer_tokens": 4},
}
CANARIES = [{"response": "abc", "score": 6.0}, {"response": "", "score": 0.0}]
OWN = {"function": "faulty_rewards:needs", "parameters": {"factor": 2}, "weight": 0.1, "canaries": CANARIES}


@pytest.fixture(scope="module")
def scoring() -> Iterator[Scoring]:
    clash = {"clarity": {"function": "exact_match"}, "other": {"function": "faulty_rewards:faulty"}}
    sources = {"sum": SUM, "own": {"mine": OWN}, "clash": clash, "partly": {**SUM, "broken": {"function": "faulty_rewards:faulty"}}}
    with Scoring(RewardConfig(by_data_source=sources, default="exact_match", runner=RUNNER)) as opened:
        yield opened


def test_a_sum_is_of_its_parts_by_their_weights(scoring: Scoring) -> None:
    # 2 x 1 + 0.5 x 1 - 0.75. Mutations: weights left out; weights in the parts too.
    found = scoring.result(scoring.begin(prompt("sum"), "<think>2 + 3</think> 5", 9, True))
    assert found.reward == pytest.approx(2 * 1 + 0.5 * 1 - 0.75)
    # Form and length say nothing of whether it is right. Mutation: all parts in the outcome: of groups that are all wrong, some then have signal.
    assert found.outcome == 2.0
    assert found.parts == {"answer": 1.0, "form": 1.0, "long": -0.75}


def test_parameters_of_ones_own_function(scoring: Scoring) -> None:
    found = scoring.result(scoring.begin(prompt("own"), "abcd", 1, True))
    assert (found.reward, found.outcome, found.parts) == (pytest.approx(0.8), pytest.approx(0.8), {"mine": 8.0})


def test_where_every_part_shapes_the_reward_the_outcome_is_their_sum() -> None:
    # Mutation: an outcome of 0 whatever they say: no group would ever have signal.
    with Scoring(RewardConfig(default={"form": SUM["form"]}, runner=RUNNER)) as shaped:
        found = shaped.result(shaped.begin(prompt("any"), "<think>2 + 3</think> 5", 9, True))
    assert (found.reward, found.outcome) == (0.5, 0.5)


def test_where_a_part_fails_the_sum_is_unknown(scoring: Scoring) -> None:
    # Mutation: the sum of the others.
    found = scoring.result(scoring.begin(prompt("partly"), "nan", 1, True))
    assert (found.reward, found.status, found.parts) == (0.0, "error", {})
    assert found.reason.startswith("reward faulty_rewards:faulty gave nan")


def test_two_numbers_of_one_name_are_refused(scoring: Scoring) -> None:
    with pytest.raises(RewardError, match="faulty_rewards:faulty gives the number clarity, which another part is or gives"):
        scoring.result(scoring.begin(prompt("clash"), "dict", 1, True))


def test_known_answers_of_the_recipe_and_of_the_functions_are_checked(scoring: Scoring) -> None:
    asked = scoring.begin_canaries()
    scoring.check(asked)
    # Two of exact_match, regex and format each, three of overlong, and the recipe's two. Mutation: those of the recipe left out.
    assert len(asked) == 2 + 2 + 2 + 3 + 2


def test_a_known_answer_of_the_recipe_that_comes_out_wrong_is_named() -> None:
    wrong = {"mine": {**OWN, "canaries": [{"response": "abc", "score": 5.0}]}}
    with (
        Scoring(RewardConfig(default=wrong, runner=RUNNER)) as opened,
        pytest.raises(RewardError, match="faulty_rewards:needs scored 6 where 5 is known to be right: response 'abc'"),
    ):
        opened.check(opened.begin_canaries())

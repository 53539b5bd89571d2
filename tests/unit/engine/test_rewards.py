"""Rewards: where the answer is looked for, what counts as right, and that no fault becomes a 0."""

import math
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch
from engine.config import EngineConfig, RewardConfig
from engine.prompts import Prompt
from engine.rewards.answers import after_thinking, last_boxed
from engine.rewards.exact_match import exact_match
from engine.rewards.registry import REWARDS
from engine.rewards.scoring import score
from engine.workers.reward import RewardWorker

RIGHT_BOX = r"\boxed{5}"


def prompt(number: int = 0, data_source: str = "sums", ground_truth: str = "5") -> Prompt:
    return Prompt(id=f"id{number}", index=number, messages=(), data_source=data_source, ground_truth=ground_truth)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{1} and \boxed{2}", "2"),  # Mutation: the first one.
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),  # Mutation: stop at the first closing brace.
        (r"{x} \boxed{\{1, 2\}} }", r"\{1, 2\}"),
        (r"\boxed{\{1}", r"\{1"),  # Mutation: count escaped braces: the box never closes.
        (r"\boxed{3} no, \boxed{5", "3"),  # cut off by the token limit
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{5", None),
        ("5", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@given(st.text(alphabet="\\boxed{} 5", max_size=60))
def test_last_boxed_finds_what_is_appended(noise: str) -> None:
    assert last_boxed(noise + " \\boxed{a{b}c}") == "a{b}c"


def test_after_thinking() -> None:
    assert after_thinking("a</think>b</think>c") == "c"  # Mutation: partition for rpartition.
    assert after_thinking("no thinking") == "no thinking"
    assert after_thinking("all thinking</think>") == ""


@pytest.mark.parametrize(
    ("response", "ground_truth", "value"),
    [
        (RIGHT_BOX, "5", 1.0),
        (r"so \boxed{ 5 } .", " 5", 1.0),
        (r"<think>\boxed{4}</think>\boxed{5}", "5", 1.0),
        (r"<think>\boxed{5}</think> I do not know", "5", 0.0),
        (r"\boxed{+5}", "5", 0.0),
        (r"\boxed{05}", "5", 0.0),
        (r"\boxed{5.0}", "5", 0.0),
        ("5", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_exact_match(response: str, ground_truth: str, value: float) -> None:
    assert exact_match(response, ground_truth) == value


@pytest.mark.parametrize(
    ("response", "ground_truth", "value"),
    [
        (RIGHT_BOX, "5", 1.0),
        (r"\boxed{+5}", "5", 1.0),
        (r"\boxed{3+2}", "5", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        (r"\boxed{[0, 1)}", "[0,1)", 1.0),
        (r"\boxed{5}", r"\boxed{5}", 1.0),
        ("The answer is 1/2.", "0.5", 1.0),
        (r"7 or 8? \boxed{5}, and then 9", "5", 1.0),
        (r"<think>\boxed{4}</think>\boxed{5}", "5", 1.0),
        (r"<think>\boxed{5}</think>I do not know", "5", 0.0),
        (r"\boxed{4}", "5", 0.0),
        (r"\boxed{5}\boxed{4}", "5", 0.0),  # a set of two: guessing several answers does not pay
        (r"\boxed{5", "5", 0.0),
        (r"\boxed{\frac{", "5", 0.0),
        ("no number", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_math_verify(response: str, ground_truth: str, value: float) -> None:
    assert REWARDS.get("math_verify")(response, ground_truth) == value


def test_math_verify_works_outside_the_main_thread() -> None:
    # Mutation: leave the library's deadlines on: signals work in the main thread only, and every score is an error.
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(REWARDS.get("math_verify")(RIGHT_BOX, "5")))
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_an_unreadable_ground_truth_is_an_error_of_the_data() -> None:
    with pytest.raises(ValueError, match="cannot read the ground truth ''") as caught:
        score(RewardConfig(), [RIGHT_BOX], [prompt(3, ground_truth="")])
    assert "prompt id3 (row 3)" in caught.value.__notes__[0]


def test_data_source_chooses_the_reward() -> None:
    # Mutation: always the default.
    config = RewardConfig(by_data_source={"strict": "exact_match"}, default="math_verify")
    assert score(config, [r"\boxed{05}"] * 2, [prompt(0, "strict"), prompt(1, "loose")]) == [0.0, 1.0]
    assert score(config, [], []) == []


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="2 responses were given with 1 prompts"):
        score(RewardConfig(), ["a", "b"], [prompt()])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", None, 1j, [1.0]])
def test_a_score_that_is_no_finite_number_is_an_error(monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    # Mutation: float(value) without the check: NaN becomes an advantage, "1" passes.
    monkeypatch.setattr("engine.rewards.exact_match.exact_match", lambda response, ground_truth: value)
    with pytest.raises(ValueError, match=r"reward exact_match gave .* for prompt id4 \(row 4\)"):
        score(RewardConfig(default="exact_match"), ["a"], [prompt(4)])


@pytest.mark.parametrize("value", [True, 1, np.float32(1.0)])
def test_every_kind_of_real_number_becomes_a_float(monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    monkeypatch.setattr("engine.rewards.exact_match.exact_match", lambda response, ground_truth: value)
    scores = score(RewardConfig(default="exact_match"), ["a"], [prompt()])
    assert scores == [1.0]
    assert type(scores[0]) is float


def worker() -> RewardWorker:
    return RewardWorker(config=EngineConfig(max_context_tokens=8), model_directory=Path(), device="cpu", dtype="float32", rank=0, ranks=1)


def test_shuffle_deals_the_same_scores_out_anew() -> None:
    scores = Batch(tensors={"reward": torch.tensor([1.0] * 10 + [0.0] * 30)})

    def shuffled(*seed: int) -> list[float]:
        return worker().combine(scores, {}, seed).tensors["reward"].tolist()

    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    first = shuffled(7, 1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # Mutation: np.random.shuffle.
    assert sum(first) == 10
    assert first != [1.0] * 10 + [0.0] * 30  # Mutation: return the scores as they are.
    assert first == shuffled(7, 1)
    assert first != shuffled(7, 2)


def test_annotators_scores_count_by_their_weight() -> None:
    scores = Batch(tensors={"reward": torch.tensor([1.0, 0.0]), "judge/score": torch.tensor([4.0, -2.0]), "other/score": torch.tensor([9.0, 9.0])})
    # 1 + 0.5 x 4 and 0 - 0.5 x 2; what has no weight counts nothing. Mutation: the weight left out.
    combined = worker().combine(scores, {"judge": 0.5}, (1, 2)).tensors
    assert sorted(combined["reward"].tolist()) == [-1.0, 3.0]
    assert worker().combine(scores, {"judge": 0.5}, None).tensors["reward"].tolist() == [3.0, -1.0]
    # Whether a group has signal is asked of what the functions gave. Mutation: of the sum, or dealt out.
    assert combined["outcome"].tolist() == [1.0, 0.0]


def test_what_was_scored_ahead_is_not_scored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def reward(response: str, ground_truth: str) -> float:
        asked.append(response)
        return float(len(response))

    monkeypatch.setattr("engine.rewards.exact_match.exact_match", reward)
    judge = worker()
    judge.use(RewardConfig(default="exact_match"))
    judge.load_prompts("set", [prompt(0), prompt(1)])
    judge.score_ahead([("set", 0, "long"), ("set", 1, "longer")])
    rollout = Batch(tensors={"prompt": torch.tensor([1, 0, 0])}, objects={"response": ["longer", "long", "new"]}, meta={"prompt_set": "set"})
    assert judge.score(rollout).tensors["reward"].tolist() == [6.0, 4.0, 3.0]
    # Mutations: score everything again; keep what was scored ahead for a later step, which may score otherwise.
    assert asked == ["long", "longer", "new"]
    judge.score(rollout)
    assert asked[3:] == ["longer", "long", "new"]


def test_the_configuration_refuses_rewards_that_there_are_not() -> None:
    with pytest.raises(ValueError, match=r"by_data_source\.sums: no reward is called 'exact_mach': did you mean exact_match"):
        RewardConfig(by_data_source={"sums": "exact_mach"})
    assert RewardConfig(default="my_rewards.polite:polite").default == "my_rewards.polite:polite"

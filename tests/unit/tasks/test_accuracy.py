"""Accuracies around a stage, over all prompts and by difficulty, by hand."""

import pytest

from engine.config import EvaluationConfig
from engine.trainer.evaluation import Evaluation
from tasks.accuracy import accuracy, difficulty_order, record_gain
from tasks.record import StageRecord

CONFIG = EvaluationConfig(samples_per_prompt=2, max_response_tokens=8)


def evaluation(label: str, samples: list[list[float]], greedy: list[float]) -> Evaluation:
    return Evaluation(label, ["a", "b", "c"], ["10", "2", "hard"], greedy, samples, [], 9.0, 12)


BEFORE = evaluation("base", [[0, 1], [1, 1], [0, 0]], [0, 1, 0])
AFTER = evaluation("rl", [[1, 1], [0, 1], [0, 1]], [1, 1, 0])


def test_a_gain_is_what_the_same_prompts_gained() -> None:
    """Prompts go from 1/2, 1, 0 to 1, 1/2, 1/2: by +1/2, -1/2, +1/2, so 1/6 in the mean.

    Three draws of these are all -1/2 with probability 1/27, more than 2.5 %, and all +1/2 with 8/27. Mutations: before and after the other way round;
    the ends of two separate intervals, which go from 0 to 1 and from 1/2 to 1.
    """
    stage = StageRecord(name="rl", kind="rl", steps_planned=2)
    record_gain(stage, BEFORE, AFTER, CONFIG, seed=0)
    assert (stage.accuracy_before, stage.accuracy_after) == (pytest.approx(1 / 2), pytest.approx(2 / 3))
    assert stage.gain == pytest.approx(1 / 6)
    assert stage.gain_interval == (pytest.approx(-1 / 2), pytest.approx(1 / 2))
    assert (stage.greedy_before, stage.greedy_after) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert (stage.samples_per_prompt, stage.confidence) == (2, CONFIG.confidence)
    # Mutation: the difficulties in the order of the prompts.
    assert list(stage.by_difficulty) == ["2", "10", "hard"]
    assert {name: (found.before, found.after) for name, found in stage.by_difficulty.items()} == {"2": (1, 0.5), "10": (0.5, 1), "hard": (0, 0.5)}


def test_numbers_come_by_value_before_words() -> None:
    # Mutation: by the alphabet.
    assert sorted(["hard", "10", "2", "all", "0.5"], key=difficulty_order) == ["0.5", "2", "10", "all", "hard"]


def test_metrics_are_named_by_the_number_of_samples() -> None:
    found = accuracy(AFTER, CONFIG, seed=0).metrics()
    assert found["accuracy/avg_at_2"] == pytest.approx(2 / 3)
    assert found["accuracy/avg_at_2_low"] < found["accuracy/avg_at_2"] < found["accuracy/avg_at_2_high"]
    # Mutation: the drawn answers' for the greedy ones.
    assert found["accuracy/greedy"] == pytest.approx(2 / 3)
    assert (found["accuracy_by_difficulty/avg_at_2/hard"], found["accuracy_by_difficulty/greedy/hard"]) == (0.5, 0.0)

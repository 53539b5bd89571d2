"""Which groups have signal, and what stands in for those that have none."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithms.groups import Groups
from engine.algorithms.grpo import grpo
from engine.algorithms.selection import Visit, by_signal, mean_outcomes, substituted
from engine.algorithms.step import step_advantages
from engine.batch import Batch
from engine.config import AlgorithmConfig

POLARIS = 1 / 3


def groups(signals: list[bool], size: int = 2) -> list[tuple[list[int], bool]]:
    return [(list(range(size * number, size * (number + 1))), signal) for number, signal in enumerate(signals)]


def test_signal_is_two_valid_samples_of_different_outcome() -> None:
    prompts = torch.tensor([7, 3, 7, 3, 5, 5, 9, 9])
    outcomes = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    valid = torch.tensor([True, True, True, True, True, False, True, True])
    # In the order of first rows, not of prompt numbers. Mutations: count samples that are not valid (group of 5); sort by prompt.
    assert by_signal(outcomes, prompts, valid) == [([0, 2], True), ([1, 3], False), ([4, 5], False), ([6, 7], False)]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0]), st.booleans()), min_size=1, max_size=30))
def test_groups_with_signal_are_those_whose_advantages_are_not_all_zero(rows: list[tuple[int, float, bool]]) -> None:
    prompts, outcomes, valid = (torch.tensor(column) for column in zip(*rows, strict=True))
    found = by_signal(outcomes, prompts, valid)
    assert sorted(row for of_group, _ in found for row in of_group) == list(range(len(rows)))
    advantages = grpo(outcomes, Groups.of(outcomes, prompts, valid), "group", valid)
    for of_group, signal in found:
        assert len(set(prompts[of_group].tolist())) == 1
        assert signal == bool(advantages[of_group].any())


# Mutations: donors drawn with replacement where there are enough; a group without signal as a donor; other groups than those without signal replaced.
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 100))
def test_every_group_has_signal_after_substitution(signals: list[bool], seed: int) -> None:
    before, number = groups(signals), sum(signals)
    after = substituted(before, (seed, 1), POLARIS)
    if number <= len(signals) // 3:
        assert after == []
        return
    donors = [rows for rows, signal in before if signal]
    assert len(after) == len(before)
    assert all(rows in donors for rows in after)
    assert all(found == rows for found, (rows, signal) in zip(after, before, strict=True) if signal)
    times = Counter(tuple(rows) for rows in after)
    if len(signals) - number <= number:
        assert max(times.values()) <= 2  # itself, and once in another's place


# POLARIS trains where more than floor(128 / 3) = 42 of 128 groups have signal. Mutation: `<` instead of `<=`.
@pytest.mark.parametrize(("number", "trains"), [(42, False), (43, True)])
def test_a_step_with_too_few_groups_with_signal_makes_no_update(number: int, trains: bool) -> None:
    assert bool(substituted(groups([row < number for row in range(128)]), (0, 1), POLARIS)) is trains


def test_without_any_signal_there_is_nothing_to_draw_from() -> None:
    assert substituted(groups([False, False]), (0,), 0.0) == []
    assert substituted(groups([True, False]), (0,), 0.0) == [[0, 1], [0, 1]]


def test_the_choice_is_the_seeds() -> None:
    signals = [row % 2 == 0 for row in range(40)]
    assert substituted(groups(signals), (3, 1, 2), POLARIS) == substituted(groups(signals), (3, 1, 2), POLARIS)
    assert len({str(substituted(groups(signals), (seed, step, 2), POLARIS)) for seed in (0, 1) for step in (1, 2)}) == 4


def test_a_group_that_stands_in_for_another_is_a_group_of_its_own() -> None:
    # The deviation of [1, 0] is sqrt(1/2), of [1, 0, 1, 0] sqrt(1/3). Mutation: group by `prompt`, which copies share with their donor.
    batch = Batch(
        {
            "response_mask": torch.ones(4, 1, dtype=torch.bool),
            "prompt": torch.tensor([5, 5, 5, 5]),
            "group": torch.tensor([0, 0, 1, 1]),
            "reward": torch.tensor([1.0, 0.0, 1.0, 0.0]),
        }
    )
    expected = 0.5 / 0.5**0.5
    found = step_advantages(batch, AlgorithmConfig()).tensors["advantages"][:, 0]
    assert found.tolist() == pytest.approx([expected, -expected, expected, -expected], abs=1e-5)


def test_visits_are_means_over_the_samples_that_have_a_score() -> None:
    prompts = torch.tensor([7, 3, 7, 3, 5, 5])
    outcomes = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 1.0])
    scored = torch.tensor([True, True, True, False, False, False])
    # A prompt without any score has not been visited. Mutations: count its samples as 0; means over all samples.
    assert mean_outcomes(outcomes, prompts, scored) == [Visit(7, 0.75, 2), Visit(3, 0.0, 1)]
    assert mean_outcomes(outcomes, prompts, None) == [Visit(7, 0.75, 2), Visit(3, 0.0, 2), Visit(5, 1.0, 2)]

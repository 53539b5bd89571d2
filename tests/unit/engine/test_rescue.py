"""The memory of right responses: what it keeps, whom it helps, and that a response comes whole."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithms.rescue import RescueMemory
from engine.algorithms.step import step_advantages
from engine.batch import Batch, concat
from engine.config import AlgorithmConfig, RescueConfig


def sample(prompt: int, number: int, outcome: float, version: int, tokens: int = 2) -> Batch:
    """One row, whose every column says which it is."""
    mark = 1000 * version + 10 * prompt + number
    response = torch.ones(1, tokens, dtype=torch.bool)
    response[:, 0] = False
    return Batch(
        {
            "input_ids": torch.full((1, tokens), mark),
            "attention_mask": torch.ones(1, tokens, dtype=torch.bool),
            "response_mask": response,
            "rollout_log_probs": torch.full((1, tokens), -float(mark)),
            "prompt": torch.tensor([prompt]),
            "sample": torch.tensor([number]),
            "outcome": torch.tensor([float(outcome)]),
            "reward": torch.tensor([outcome + 0.5]),
            "response_tokens": torch.tensor([tokens - 1]),
            "weight_version": torch.tensor([version]),
            "greedy_reward": torch.tensor([float(version)]),
        },
        {"response": [str(mark)]},
        {"prompt_set": "rl"},
    )


def step(version: int, outcomes: dict[int, list[float]], tokens: int = 2) -> Batch:
    return concat([sample(prompt, number, outcome, version, tokens) for prompt, of in outcomes.items() for number, outcome in enumerate(of)])


def test_one_wrong_response_of_an_all_wrong_group_is_replaced_with_all_its_columns() -> None:
    memory = RescueMemory(RescueConfig())
    memory(step(1, {4: [0, 1, 0, 0], 5: [0, 0, 0, 0]}, tokens=6), (0, 1))
    before = step(2, {4: [0, 0, 0, 0], 5: [0, 0, 0, 0], 6: [1, 0, 0, 0]})
    after = memory(before, (0, 2))
    (row,) = after.tensors["rescued"].nonzero().squeeze(1).tolist()
    # Prompt 5 was never answered right, and prompt 6 needs no help. Mutation: help every group that is in the memory, or whose mean is 0.
    assert row in range(4)
    # Sample 1 of prompt 4 at version 1, longer than what it is put among. Mutations: any column left behind; the row cut to the batch's width.
    assert after.objects["response"][row] == "1041"
    assert after.tensors["input_ids"][row].tolist() == [1041] * 6
    assert after.tensors["rollout_log_probs"][row].tolist() == [-1041.0] * 6
    assert after.tensors["attention_mask"][row].tolist() == [True] * 6
    for name, value in {"outcome": 1.0, "reward": 1.5, "weight_version": 1, "response_tokens": 5, "prompt": 4, "sample": row}.items():
        assert after.tensors[name][row] == value, name
    # The greedy answer to the prompt is the policy's of now. Mutation: let it come along.
    assert after.tensors["greedy_reward"].tolist() == [2.0] * 12
    others = torch.tensor([other for other in range(12) if other != row])
    assert after.tensors["input_ids"][others, :2].equal(before.tensors["input_ids"][others])
    assert not after.tensors["input_ids"][others, 2:].any()


def test_its_advantage() -> None:
    # One right among eight: (7/8) / sqrt(1/8) and (-1/8) / sqrt(1/8), the deviation with ddof 1.
    memory = RescueMemory(RescueConfig())
    memory(step(1, {4: [1] + [0] * 7}), (0, 1))
    after = memory(step(2, {4: [0] * 8}), (0, 2))
    found = step_advantages(after, AlgorithmConfig()).tensors["advantages"][:, 1]
    rescued = after.tensors["rescued"]
    assert found[rescued].tolist() == pytest.approx([2.475], abs=1e-3)
    assert found[~rescued].tolist() == pytest.approx([-0.354] * 7, abs=1e-3)


def test_the_last_right_responses_are_kept() -> None:
    memory = RescueMemory(RescueConfig(responses_per_prompt=2))
    for version in (1, 2, 3):
        memory(step(version, {4: [0, 1]}), (0, version))
    # Mutation: keep the first ones.
    assert [row.objects["response"] for row in memory.state()[4]] == [["2041"], ["3041"]]
    # Both come, by the seed.
    came = {memory(step(4, {4: [0, 0]}), (seed,)).objects["response"][row] for seed in range(20) for row in (0, 1)}
    assert {"2041", "3041"} <= came


def test_of_too_many_prompts_the_oldest_are_forgotten() -> None:
    memory = RescueMemory(RescueConfig(max_prompts=2))
    memory(step(1, {4: [1, 0], 5: [1, 0]}), (0, 1))
    memory(step(2, {4: [1, 0]}), (0, 2))
    memory(step(3, {6: [1, 0]}), (0, 3))
    # 4 was refreshed. Mutation: a prompt keeps its first place.
    assert list(memory.state()) == [4, 6]


@pytest.mark.parametrize(("above", "outcome", "helped"), [(0.0, 0.5, True), (0.5, 0.5, False), (0.0, 0.0, False), (0.0, -1.0, False)])
def test_what_right_means(above: float, outcome: float, helped: bool) -> None:
    memory = RescueMemory(RescueConfig(right_above=above))
    memory(step(1, {4: [outcome, -1]}), (0, 1))
    assert bool(memory(step(2, {4: [-1, -1]}), (0, 2)).tensors["rescued"].any()) is helped


def test_a_response_without_a_token_is_never_remembered() -> None:
    # Mutation: `right` without the look at response_tokens.
    memory = RescueMemory(RescueConfig())
    memory(step(1, {4: [1, 0]}, tokens=1), (0, 1))
    assert not memory.state()


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=5, unique_by=lambda one: one[0]), min_size=1, max_size=6))
def test_only_all_wrong_groups_change_and_the_memory_survives_a_restart(steps: list[list[tuple[int, bool]]]) -> None:
    config = RescueConfig(responses_per_prompt=2, max_prompts=3)
    memory = RescueMemory(config)
    for version, of_step in enumerate(steps, start=1):
        before = step(version, {prompt: [float(right), 0.0] for prompt, right in of_step})
        restarted = RescueMemory(config)
        restarted.load_state(pickle.loads(pickle.dumps(memory.state())))
        after = memory(before, (7, version))
        again = restarted(before, (7, version))
        # Mutation: random numbers that are not of the seed alone, or state that is left out.
        assert after.objects == again.objects
        assert all(tensor.equal(again.tensors[name]) for name, tensor in after.tensors.items())
        for group, (prompt, right) in enumerate(of_step):
            rescued = after.tensors["rescued"][2 * group : 2 * group + 2]
            assert int(rescued.sum()) <= int(not right)
            assert after.tensors["prompt"][2 * group : 2 * group + 2].tolist() == [prompt] * 2
        assert len(memory.state()) <= 3
        assert all(len(responses) <= 2 for responses in memory.state().values())

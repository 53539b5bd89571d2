from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.prompts import Prompt, PromptSampler, content_hash, sample_seed


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=f"{i:016x}", index=i, messages=({"role": "user", "content": str(i)},), data_source="x", ground_truth="0") for i in range(count)]


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int]:
    count = draw(st.integers(1, 30))
    return count, draw(st.integers(1, count))


# Mutation: `missing` always 0 (steps cut short at an epoch's end), or a permutation drawn with replacement.
@settings(deadline=None)
@given(sizes(), st.integers(0, 2**31 - 1))
def test_every_prompt_is_visited_once_in_each_epoch(size: tuple[int, int], seed: int) -> None:
    count, per_step = size
    sampler = PromptSampler(prompts(count), per_step, seed)
    epochs = 4
    visited = [prompt.index for k in range(1, epochs * count // per_step + 2) for prompt in sampler.step(k)]
    for epoch in range(epochs):
        assert sorted(visited[epoch * count : (epoch + 1) * count]) == list(range(count))


# Mutation: `_order` returns `self._permutation(epoch)`: a step across two epochs may then take a prompt twice, and sample ids collide.
@settings(deadline=None)
@given(sizes(), st.integers(0, 2**31 - 1), st.integers(1, 200))
def test_a_step_holds_no_prompt_twice(size: tuple[int, int], seed: int, k: int) -> None:
    count, per_step = size
    step = PromptSampler(prompts(count), per_step, seed).step(k)
    assert len(step) == per_step
    assert max(Counter(prompt.id for prompt in step).values()) == 1


# Mutation: keep a generator in the sampler and draw from it.
@settings(deadline=None)
@given(sizes(), st.integers(0, 2**31 - 1), st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_a_step_is_a_function_of_seed_and_number(size: tuple[int, int], seed: int, steps: list[int]) -> None:
    count, per_step = size
    used = PromptSampler(prompts(count), per_step, seed)
    for k in steps:
        assert used.step(k) == PromptSampler(prompts(count), per_step, seed).step(k)


# Mutation: seed the generator by the epoch only, or by the seed only.
def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    one, other = PromptSampler(prompts(50), 50, 1), PromptSampler(prompts(50), 50, 2)
    assert one.step(1) != other.step(1)
    assert one.step(1) != one.step(2)


def test_the_order_is_numpys_permutation_seeded_by_seed_and_epoch() -> None:
    # Derivation: numpy.random.default_rng([7, 0]).permutation(6) and ([7, 1]); 6 is a multiple of 3, so no step crosses epochs.
    sampler = PromptSampler(prompts(6), 3, 7)
    assert [prompt.index for k in (1, 2, 3, 4) for prompt in sampler.step(k)] == [5, 2, 0, 4, 1, 3, 3, 0, 2, 1, 4, 5]


# Mutations: the permutation seeded by the step alone; pieces of `generation * size`; prompts of the step itself not left out.
@settings(deadline=None)
@given(sizes(), st.integers(0, 2**31 - 1), st.integers(1, 60))
def test_further_generations_ask_every_other_prompt_once(size: tuple[int, int], seed: int, k: int) -> None:
    count, per_step = size
    sampler = PromptSampler(prompts(count), per_step, seed)
    generations = [sampler.positions(k), *(sampler.more_positions(k, number) for number in range(1, 2 + count // per_step))]
    assert sorted(position for positions in generations for position in positions) == list(range(count))
    assert all(len(positions) == per_step for positions in generations[: count // per_step])
    # Of (seed, step, generation) alone: a resumed run continues exactly.
    assert PromptSampler(prompts(count), per_step, seed).more_positions(k, 1) == sampler.more_positions(k, 1)


def test_steps_and_seeds_have_further_prompts_of_their_own() -> None:
    found = {tuple(PromptSampler(prompts(60), 2, seed).more_positions(k, 1)) for seed in (0, 1) for k in (1, 2)}
    assert len(found) == 4


# Mutation: drop the check in `__init__`.
def test_more_prompts_a_step_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompts_per_step \(5\) is larger than the number of training prompts \(4\)"):
        PromptSampler(prompts(4), 5, 0)


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        PromptSampler(prompts(4), 2, 0).step(0)


# Mutation: hash `json.dumps(messages)` without sort_keys, without NFC, or without strip.
def test_equal_chats_have_equal_hashes() -> None:
    plain = content_hash([{"role": "user", "content": "4 + 3 = é"}])
    assert len(plain) == 16
    assert set(plain) <= set("0123456789abcdef")
    assert content_hash([{"content": "4 + 3 = é", "role": "user"}]) == plain
    assert content_hash([{"role": "user", "content": " 4 + 3 = e\u0301\n"}]) == plain
    assert content_hash([{"role": "user", "content": "4 + 3  = é"}]) != plain
    assert content_hash([{"role": "system", "content": "4 + 3 = é"}]) != plain


def test_hash_of_a_chat_never_changes() -> None:
    # Derivation: printf '[{"content":"4 + 3 =","role":"user"}]' | sha256sum | cut -c1-16
    assert content_hash([{"role": "user", "content": "4 + 3 ="}]) == "abdf755264db06a1"


# Mutation: leave any argument out of the key, or add the sample number modulo something small.
@settings(deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 10_000))
def test_samples_of_a_group_have_different_seeds(run_seed: int, step: int) -> None:
    seeds = [sample_seed(run_seed, "rl", step, "0123456789abcdef", k) for k in range(64)]
    assert len(set(seeds)) == 64
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_every_part_of_a_samples_name_changes_its_seed() -> None:
    base = sample_seed(1, "rl", 2, "a", 3)
    others = [(2, "rl", 2, "a", 3), (1, "sft", 2, "a", 3), (1, "rl", 3, "a", 3), (1, "rl", 2, "b", 3), (1, "rl", 2, "a", 4)]
    assert base not in [sample_seed(*other) for other in others]
    assert base == sample_seed(1, "rl", 2, "a", 3)

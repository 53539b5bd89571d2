"""Which samples a step draws: the same ones however the plan is cut, and few bytes."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from engine.config import SamplingConfig
from engine.prompts import Prompt, content_hash, sample_seed
from engine.rollout.plan import PromptSet, SamplePlan
from engine.tokenizer import character_tokenizer, render_prompt

TOKENIZER = character_tokenizer(64)
PROMPTS = [
    Prompt(id=content_hash(messages), index=index, messages=messages, data_source="sums", ground_truth="0")
    for index, messages in enumerate(({"role": "user", "content": f"{number}+1"},) for number in range(6))
]


def plan(**changes: object) -> SamplePlan:
    fields = {"prompt_set": "rl", "prompts": (4, 0, 3), "samples_per_prompt": 4, "sampling": SamplingConfig(), "max_tokens": 9, "seed": 5}
    return SamplePlan(**{**fields, "stage": "rl", "step": 7, **changes})  # type: ignore[arg-type]


# Mutations: `start` counted from the whole in a part of a part; seeds by the place in a part; the longer parts last (not Batch.chunk's way).
@given(first=st.integers(1, 5), second=st.integers(1, 3))
def test_parts_ask_for_what_the_whole_asks_for(first: int, second: int) -> None:
    prompt_set, whole = PromptSet(PROMPTS), plan()
    parts = [part for half in whole.chunk(first) for part in half.chunk(second)]
    assert [request for part in parts for request in part.requests(prompt_set, TOKENIZER)] == whole.requests(prompt_set, TOKENIZER)
    assert [place for part in parts for place in part.places()] == whole.places()
    assert sum(map(len, parts)) == len(whole) == 12
    assert all(part.total == 12 for part in parts)
    sizes = [len(part) for part in whole.chunk(first)]
    assert sizes == sorted(sizes, reverse=True)


def test_a_sample_is_named_by_its_prompt_and_number() -> None:
    requests = plan().requests(PromptSet(PROMPTS), TOKENIZER)
    assert plan().places() == [(position, k) for position in (4, 0, 3) for k in range(4)]
    assert requests[5].prompt_tokens == render_prompt(TOKENIZER, PROMPTS[0].messages)
    assert requests[5].seed == sample_seed(5, "rl", 7, PROMPTS[0].id, 1)
    assert len({request.seed for request in requests}) == 12


def test_the_first_sample_of_a_prompt_may_be_greedy() -> None:
    # Mutation: the first of the step instead of each prompt's.
    sampled = [request.sampling is not None for request in plan(greedy_first=True).requests(PromptSet(PROMPTS), TOKENIZER)]
    assert sampled == [False, True, True, True] * 3


def test_every_prompt_may_be_answered_greedily_beside_its_samples() -> None:
    # Mutations: a greedy request for each sample; in place of a sample; other seeds for the samples because of it.
    prompt_set, whole = PromptSet(PROMPTS), plan(greedy_baseline=True)
    requests = whole.requests(prompt_set, TOKENIZER)
    assert requests[:12] == plan().requests(prompt_set, TOKENIZER)
    assert whole.baselines() == [4, 0, 3]
    greedy = requests[12:]
    assert [request.prompt_tokens for request in greedy] == [render_prompt(TOKENIZER, PROMPTS[position].messages) for position in (4, 0, 3)]
    assert {(request.sampling, request.max_tokens) for request in greedy} == {(None, 9)}
    # A part answers what its own samples ask: six samples of three prompts are two of the one in the middle.
    assert (len(whole), whole.total, plan().baselines()) == (12, 12, [])
    assert [part.baselines() for part in whole.chunk(2)] == [[4, 0], [0, 3]]


def test_it_costs_next_to_nothing_to_send() -> None:
    # 256 samples. Mutation: carry the token ids.
    assert len(pickle.dumps(plan(prompts=tuple(range(4000, 4032)), samples_per_prompt=8))) < 1500

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_worker import (
    MAX_CONTEXT_TOKENS,
    Drawn,
    InProcess,
    Ranks,
    draw,
    has_shared_memory,
    load,
    refusal,
    second_stream,
    shared_memory,
    unfinished,
)
from safetensors.torch import load_file
from toy import ARCHITECTURE
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import ModelConfig, RolloutConfig, SamplingConfig
from engine.model import create
from engine.reshard.checkpoint import described
from engine.reshard.layout import Tensor
from engine.rollout.backend import Request
from engine.rollout.transformers import TransformersBackend
from engine.rollout.vllm import VLLMBackend
from engine.tokenizer import render_prompt

CONFIG = RolloutConfig(max_concurrent_samples=8)
QUESTIONS = ["1+2", "what is 7*8?", "a", "3-1=", "hello there, how are you today?"]
# Of random weights as large as these the likeliest token has about a third of the probability.
OPINIONATED = ARCHITECTURE.model_copy(update={"initializer_range": 0.3})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models that differ in their weights only. Their heads are tied."""
    directory = tmp_path_factory.mktemp("models")
    config = ModelConfig(architecture=OPINIONATED)
    return create(config, 0, directory / "first"), create(config, 1, directory / "second")


@pytest.fixture(scope="module")
def engines(models: tuple[Path, Path]) -> Iterator[dict[str, Any]]:
    first, second = models
    vllm = Ranks("vllm", first, CONFIG)
    pair = Ranks("vllm", second, CONFIG.model_copy(update={"tensor_parallel_ranks": 2}), ranks=2)
    yield {"vllm": vllm, "pair": pair, "transformers": InProcess("transformers", first, CONFIG)}
    vllm.close()
    pair.close()


@pytest.fixture(params=["transformers", "vllm"])
def engine(request: pytest.FixtureRequest, engines: dict[str, Any]) -> Any:
    """Each backend with the first model's weights."""
    return engines[request.param]


@pytest.fixture(scope="module")
def tokenizer(models: tuple[Path, Path]) -> Any:
    return AutoTokenizer.from_pretrained(models[0])


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    return [render_prompt(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]


def answers(engine: Any, requests: list[Request]) -> list[Drawn]:
    """In the order of the requests."""
    drawn = engine.ask(draw, requests)[0]
    assert sorted(one.position for one in drawn) == list(range(len(requests)))
    return sorted(drawn, key=lambda one: one.position)


def greedy(prompts: list[list[int]], max_tokens: int = 48) -> list[Request]:
    return [Request(prompt, 0, None, max_tokens) for prompt in prompts]


def sampled(prompts: list[list[int]], max_tokens: int = 48, **settings: Any) -> list[Request]:
    return [Request(prompt, 1000 + i, SamplingConfig(**settings), max_tokens) for i, prompt in enumerate(prompts)]


def assert_alike(these: list[Drawn], those: list[Drawn]) -> None:
    assert [(one.position, one.tokens, one.finished) for one in these] == [(one.position, one.tokens, one.finished) for one in those]
    for this, that in zip(these, those, strict=True):
        torch.testing.assert_close(torch.tensor(this.log_probs), torch.tensor(that.log_probs), atol=1e-5, rtol=0)


def plain_logits(model_directory: Path, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """[len(tokens), V] float64: one pass over prompt and response, without a cache."""
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.double()


# Mutations: positions that count the padding; the padding on the right; the log-probs of the tempered distribution for greedy rows;
# `max_context_tokens` not heeded by one of them; the end of turn left out of one's tokens.
@pytest.mark.timeout(300)
def test_both_backends_give_the_same_greedy_answers(engines: dict[str, Any], prompts: list[list[int]], tokenizer: Any) -> None:
    at_the_brim = (prompts[4] * 20)[: MAX_CONTEXT_TOKENS - 5]
    requests = greedy([*prompts, at_the_brim, prompts[0]], max_tokens=64)
    vllm = answers(engines["vllm"], requests)
    assert_alike(vllm, answers(engines["transformers"], requests))
    assert len(vllm[5].tokens) == 5
    assert not vllm[5].finished
    ended = [one for one in vllm if one.finished]
    assert ended
    assert all(one.tokens[-1] == tokenizer.eos_token_id for one in ended)


# Mutations: give each rank a seed of its own; draw unseeded; let one rank sort its requests.
@pytest.mark.timeout(300)
def test_ranks_that_share_an_engine_agree_with_each_other_and_with_one_rank(
    engines: dict[str, Any], models: tuple[Path, Path], prompts: list[list[int]]
) -> None:
    second = InProcess("transformers", models[1], CONFIG)
    requests = greedy(prompts)
    assert_alike(answers(engines["pair"], requests), answers(second, requests))

    # More than fit side by side, and several end at once by a stop text.
    mixed = [*sampled(prompts * 2), *greedy(prompts), *sampled(prompts * 3, top_p=0.8, stop=["a", "e", "1"], max_tokens=30)]
    for _ in range(3):
        one, other = engines["pair"].ask(draw, mixed)
        assert one == other
    assert {len(one.tokens) for one in one} > {48}


# Mutations: vLLM's own worker, whose memory is called "-tp:0-[0-1]-cpushm" in every run; leave the files where a killed run leaves them.
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into Linux's /proc")
def test_the_shared_memory_of_an_engine_is_its_own(engines: dict[str, Any]) -> None:
    if not all(engines["pair"].ask(has_shared_memory)):
        pytest.skip("vLLM does not use shared memory on this processor")
    one, other = engines["pair"].ask(shared_memory)
    assert set(one) == set(other)
    assert len(set(one)) == 2
    assert all(re.fullmatch(r"/dev/shm/[0-9a-f]{32}-tp.* \(deleted\)", file) for file in one)


# Mutations: collect all responses before the first is yielded; keep finished rows until the whole batch is done.
@pytest.mark.timeout(300)
def test_responses_come_as_soon_as_they_are_finished(engine: Any, prompts: list[list[int]]) -> None:
    requests = greedy(prompts, max_tokens=64)
    requests[3] = Request(prompts[3], 0, None, 2)
    drawn = engine.ask(draw, requests)[0]
    assert drawn[0].position == 3
    # Every prompt goes through the model in the first pass, and each pass gives every unfinished response one token.
    assert [one.forwards for one in drawn] == [len(one.tokens) for one in drawn]
    assert drawn[0].forwards == 2
    assert drawn[-1].forwards == 64


# Mutation: leave unfinished requests to the engine when the stream is closed.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["vllm", "pair"])
def test_closing_a_stream_aborts_the_rest(engines: dict[str, Any], models: tuple[Path, Path], prompts: list[list[int]], name: str) -> None:
    engine, weights = engines[name], models[["vllm", "pair"].index(name)]
    requests = sampled(prompts * 4)
    whole = engine.ask(draw, requests)
    for first in engine.ask(draw, requests, 1):
        assert first == whole[0][:1]
    assert engine.ask(unfinished) == [0] * len(whole)
    engine.ask(load, weights)  # refuses while cache blocks are in use
    assert engine.ask(draw, requests) == whole


# Mutation: leave the check out: each stream then swallows what the other waits for.
@pytest.mark.timeout(300)
def test_a_second_stream_waits_for_the_first(engines: dict[str, Any], prompts: list[list[int]]) -> None:
    requests = [*greedy(prompts[:1], 1), *greedy(prompts[:1], 8)]
    assert "an earlier stream" in engines["vllm"].ask(second_stream, requests)[0]


# Mutations: one temperature for the whole batch; the processed distribution's log-probs for greedy rows when others are sampled.
@pytest.mark.timeout(300)
def test_greedy_requests_beside_sampled_ones(engine: Any, prompts: list[list[int]], models: tuple[Path, Path]) -> None:
    alone = answers(engine, greedy(prompts[:3]))
    mixed = answers(engine, [*greedy(prompts[:3]), *sampled(prompts, temperature=0.5, top_k=3, min_p=0.1)])
    assert_alike(mixed[:3], alone)
    for prompt, one in zip(prompts, alone, strict=False):
        expected = plain_logits(models[0], prompt, one.tokens).log_softmax(-1).max(-1)
        assert expected.indices.tolist() == one.tokens
        torch.testing.assert_close(torch.tensor(one.log_probs).double(), expected.values, atol=1e-4, rtol=0)


# Mutations: one generator for the batch; a generator that is kept between calls; seeds by position.
@pytest.mark.timeout(300)
def test_a_sample_depends_on_its_seed_and_not_on_its_company(engine: Any, prompts: list[list[int]]) -> None:
    company = sampled(prompts * 4, temperature=1.2)
    together = answers(engine, company)
    reverse = answers(engine, company[::-1])[::-1]
    for position in (0, 7, 19):
        alone = answers(engine, [company[position]])[0]
        assert alone.tokens == together[position].tokens == reverse[position].tokens
    # And the same prompt under other seeds gives other responses.
    assert len({tuple(one.tokens) for one in together[::5]}) == 4


@pytest.mark.timeout(300)
def test_top_k_of_one_is_greedy(engine: Any, prompts: list[list[int]]) -> None:
    drawn = answers(engine, sampled(prompts, top_k=1, temperature=2.0))
    assert [one.tokens for one in drawn] == [one.tokens for one in answers(engine, greedy(prompts))]
    assert all(log_prob == 0 for one in drawn for log_prob in one.log_probs)


def allowed(probabilities: torch.Tensor, sampling: SamplingConfig) -> list[int]:
    """Told token by token, from the likeliest: each rule sees the share that a token has of what the rules before left."""
    left = sorted(range(len(probabilities)), key=lambda token: -float(probabilities[token]))
    left = [token for token in left if probabilities[token] >= sampling.min_p * probabilities[left[0]]]
    left = left[: sampling.top_k or None]
    nucleus: list[int] = []
    while left and probabilities[nucleus].sum() < sampling.top_p * probabilities[left + nucleus].sum():
        nucleus.append(left.pop(0))
    return nucleus


RULES = [
    {"temperature": 0.7},
    {"top_k": 4},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 1.4, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
]


# Mutations: leave a rule out; top_p before top_k or before min_p; min_p before the temperature; the log-probs of the unrestricted distribution.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_only_allowed_tokens_are_drawn_and_their_log_probs_are_of_what_was_allowed(
    engine: Any, models: tuple[Path, Path], prompts: list[list[int]], rule: dict[str, Any]
) -> None:
    requests = sampled(prompts * 2, **rule)
    drawn_at_the_border = 0
    for request, one in zip(requests, answers(engine, requests), strict=True):
        assert request.sampling is not None
        probabilities = (plain_logits(models[0], list(request.prompt_tokens), one.tokens) / request.sampling.temperature).softmax(-1)
        for token, log_prob, row in zip(one.tokens, one.log_probs, probabilities, strict=True):
            tokens = allowed(row, request.sampling)
            assert token in tokens
            assert log_prob == pytest.approx(float((row[token] / row[tokens].sum()).log()), abs=1e-4)
            drawn_at_the_border += len(tokens) > 1 and token == tokens[-1]
    assert drawn_at_the_border or rule == RULES[0]  # a set that is too small would show


# Mutations: heed the end of turn only; leave the last token out; `finished` False; compare a token's text alone (the text goes over several).
@pytest.mark.timeout(300)
def test_stop_texts_end_a_response_and_stay_in_it(engine: Any, prompts: list[list[int]], tokenizer: Any) -> None:
    free = answers(engine, sampled(prompts))
    texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in free]
    stop = texts[2][10:13]
    drawn = answers(engine, sampled(prompts, stop=[stop, "not to be seen"]))
    for whole, text, one in zip(free, texts, drawn, strict=True):
        assert one.tokens == whole.tokens[: len(one.tokens)]
        said = tokenizer.decode(one.tokens, skip_special_tokens=True)
        assert (said.find(stop) if stop in text else -1) == said.find(stop) == (len(said) - len(stop) if stop in said else -1)
        assert one.finished == (stop in text or whole.finished)
    assert drawn[2].finished
    assert len(drawn[2].tokens) < len(free[2].tokens)
    # A stop text that is complete with the last token that is allowed still finishes the response.
    last = Request(prompts[2], 1002, SamplingConfig(stop=[stop]), len(drawn[2].tokens))
    assert answers(engine, [last])[0].finished


# Mutations: the head not packed again (tied weights); the prefix cache kept, and its blocks not marked with the version; on two ranks, one
# rank's slices loaded twice.
@pytest.mark.timeout(300)
def test_new_weights_answer_as_an_engine_that_started_with_them(engines: dict[str, Any], models: tuple[Path, Path], prompts: list[list[int]]) -> None:
    first, second = models
    long = (prompts[4] * 10)[:200]  # full cache blocks, of 128 tokens, are what would be used again
    requests = [*greedy([*prompts, long]), *sampled(prompts)]
    single, pair, plain = (engines[name] for name in ("vllm", "pair", "transformers"))
    of_first, of_second, plainly = answers(single, requests), answers(pair, requests), answers(plain, requests)
    assert [one.tokens for one in of_first] != [one.tokens for one in of_second]
    assert single.ask(load, second) == plain.ask(load, second) == [[]]
    assert pair.ask(load, first) == [[], []]
    try:
        assert_alike(answers(single, requests), of_second)
        assert_alike(answers(pair, requests), of_first)
        assert_alike(answers(plain, requests), answers(InProcess("transformers", second, CONFIG), requests))
    finally:
        single.ask(load, first, 2)
        pair.ask(load, second, 2)
        plain.ask(load, first, 2)
    assert_alike(answers(single, requests), of_first)
    assert_alike(answers(plain, requests), plainly)


def test_the_plain_backend_refuses_weights_of_another_model(models: tuple[Path, Path]) -> None:
    backend: Any = InProcess("transformers", models[0], CONFIG)._backend
    tensors = {name: described(tensor) for name, tensor in load_file(models[1] / "model.safetensors").items()}
    norm = "model.norm.weight"
    with pytest.raises(ValueError, match=rf"{norm}: the rollout's qwen3 has it with shape \(\d+,\); the trainer has none"):
        backend.wants({name: tensor for name, tensor in tensors.items() if name != norm})
    with pytest.raises(ValueError, match=rf"{norm}: .*; the trainer's shape is \(3,\)"):
        backend.wants(tensors | {norm: Tensor((3,), "float32")})
    with pytest.raises(ValueError, match=r"model\.other: the rollout's qwen3 has no place for it"):
        backend.wants(tensors | {"model.other": Tensor((3,), "float32")})


@pytest.mark.timeout(300)
def test_what_cannot_be_answered_is_refused(engines: dict[str, Any], prompts: list[list[int]]) -> None:
    too_long = greedy([(prompts[0] * 100)[:MAX_CONTEXT_TOKENS]])
    for name in ("transformers", "vllm"):
        assert "max_context_tokens=256" in engines[name].ask(refusal, too_long)[0]
    assert "sampling.temperature" in engines["vllm"].ask(refusal, sampled(prompts, temperature=0.005))[0]
    assert_alike(answers(engines["vllm"], greedy(prompts)), answers(engines["transformers"], greedy(prompts)))  # and they go on


def test_which_ranks_share_an_engine() -> None:
    assert VLLMBackend.mesh(RolloutConfig(tensor_parallel_ranks=2), 4).part == (0, 0, 1, 1)
    assert TransformersBackend.mesh(RolloutConfig(), 3).part == (0, 1, 2)
    with pytest.raises(ValueError, match=r"rollout\.tensor_parallel_ranks: 3 ranks"):
        VLLMBackend.mesh(RolloutConfig(tensor_parallel_ranks=2), 3)
    with pytest.raises(ValueError, match=r"rollout\.tensor_parallel_ranks.*rollout\.backend=vllm"):
        TransformersBackend.mesh(RolloutConfig(tensor_parallel_ranks=2), 2)

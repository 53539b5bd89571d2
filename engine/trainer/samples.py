"""Samples on their way out, as requests, and on their way home, as rows for people: the same for training and for evaluation."""

from collections.abc import Sequence
from typing import Any

from engine.batch import Batch
from engine.config import SamplingConfig
from engine.prompts import Prompt
from engine.rollout.backend import Request
from engine.tokenizer import render_prompt


def sample_requests(
    tokenizer: Any, prompts: Sequence[Prompt], seeds: Sequence[int], samplings: Sequence[SamplingConfig | None], max_tokens: int
) -> list[Request]:
    """One request a sample, each with a random stream of its own; a sampling of None is greedy. A prompt that repeats is rendered once."""
    messages = {prompt.id: prompt.messages for prompt in prompts}
    rendered = {prompt_id: render_prompt(tokenizer, of_prompt) for prompt_id, of_prompt in messages.items()}
    return [
        Request(prompt_tokens=rendered[prompt.id], seed=seed, sampling=sampling, max_tokens=max_tokens)
        for prompt, seed, sampling in zip(prompts, seeds, samplings, strict=True)
    ]


def sample_rows(ids: Sequence[str], prompts: Sequence[Prompt], samples: Batch, rewards: Sequence[float]) -> list[dict[str, Any]]:
    """Rows of `SamplesGenerated`, one a sample."""
    columns = zip(ids, prompts, samples.objects["response"], rewards, samples.objects["response_tokens"], samples.objects["finished"], strict=True)
    return [
        {
            "sample_id": sample_id,
            "difficulty": prompt.difficulty,
            "prompt": prompt.messages[-1]["content"],
            "response": response,
            "ground_truth": prompt.ground_truth,
            "reward": reward,
            "response_tokens": tokens,
            "finished": finished,
        }
        for sample_id, prompt, response, reward, tokens, finished in columns
    ]

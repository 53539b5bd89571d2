"""Token columns of a batch, from what a rollout engine drew and from conversations."""

from collections.abc import Mapping, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from engine.batch import Batch
from engine.rollout.backend import Response


def in_order(drawn: Mapping[int, Response], requests: int, backend: str) -> list[Response]:
    """The response to each request. ValueError names the rollout backend where one is missing, or is not what a response is."""
    if missing := [position for position in range(requests) if position not in drawn]:
        raise ValueError(f"rollout.backend={backend} gave no response to {len(missing)} of {requests} requests, such as number {missing[0]}")
    responses = [drawn[position] for position in range(requests)]
    for position, response in enumerate(responses):
        if len(response.tokens) != len(response.log_probs):
            counts = f"{len(response.tokens)} tokens and {len(response.log_probs)} log-probs"
            raise ValueError(f"rollout.backend={backend} gave request {position} {counts}; every token needs its own")
    return responses


def token_tensors(prompts: Sequence[list[int]], responses: Sequence[Response]) -> dict[str, torch.Tensor]:
    """Token columns [B, T] of prompts and what was drawn to them."""
    rows = [torch.tensor([*prompt, *response.tokens]) for prompt, response in zip(prompts, responses, strict=True)]
    log_probs = [torch.tensor([0.0] * len(prompt) + response.log_probs) for prompt, response in zip(prompts, responses, strict=True)]
    input_ids = _padded(rows, torch.int64)
    position = torch.arange(input_ids.shape[1])
    attention_mask = position < torch.tensor([len(row) for row in rows]).unsqueeze(1)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "response_mask": attention_mask & (position >= torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1)),
        "rollout_log_probs": _padded(log_probs, torch.float32),
    }


def greedy_columns(prompts: Sequence[int], baselines: Sequence[int], responses: Sequence[Response], texts: Sequence[str]) -> Batch:
    """The greedy answer to the prompt of each row, from those to the prompts `baselines`: greedy_response, greedy_tokens, greedy_finished [B]."""
    place = {prompt: number for number, prompt in enumerate(baselines)}
    rows = [place[prompt] for prompt in prompts]
    return Batch(
        {
            "greedy_tokens": torch.tensor([len(responses[row].tokens) for row in rows], dtype=torch.int64),
            "greedy_finished": torch.tensor([responses[row].finished for row in rows], dtype=torch.bool),
        },
        {"greedy_response": [texts[row] for row in rows]},
    )


def conversations(rows: Sequence[tuple[list[int], list[bool]]]) -> Batch:
    """Token columns [B, T] of conversations."""
    input_ids = _padded([torch.tensor(ids) for ids, _ in rows], torch.int64)
    lengths = torch.tensor([len(ids) for ids, _ in rows]).unsqueeze(1)
    return Batch(
        tensors={
            "input_ids": input_ids,
            "attention_mask": torch.arange(input_ids.shape[1]) < lengths,
            "response_mask": _padded([torch.tensor(mask) for _, mask in rows], torch.bool),
        },
    )


def _padded(rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """[B, T], padded on the right; a rank has no row where there are fewer rows than ranks."""
    return pad_sequence(rows, batch_first=True) if rows else torch.zeros((0, 0), dtype=dtype)

"""What log-probs of the response tokens take: peak memory and seconds, all logits at once beside some rows at a time.

    python bench/memory.py [--out memory]

Every peak is measured in a process of its own. Writes docs/results/memory.{json,md}; exits with 1 when the default of `logits_rows_at_once` takes
more than half of the memory of all logits at once at the most tokens, or more at the most tokens than at half of them, or when gradient
checkpointing saves nothing.
"""

import argparse
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # Threads that wait sleep: else their processor time would count as work.

import torch
import torch.nn.functional as F
from memory_page import page
from report import commit, write
from transformers import AutoModelForCausalLM, Qwen3Config

from engine.config import TrainingConfig
from engine.training.attention import use_packed_attention
from engine.training.scoring import PolicyModel

VOCABULARY, HIDDEN, ROW = 150_000, 256, 512
TOKENS = (512, 1024, 2048, 4096)
DEFAULT = TrainingConfig().logits_rows_at_once
ROWS_AT_ONCE = (256, 512, 1024)
MOST_GIGABYTES, SPARE_GIGABYTES = 12.0, 2.0
TENSORS = 3
"""[tokens, vocabulary] that the plain way is expected to hold at its peak: to know beforehand what would not fit."""
SECONDS_TOKENS, REPETITIONS = 2048, 3
DEEP_LAYERS, DEEP_VOCABULARY, DEEP_TOKENS = 12, 1_000, 2048
TOLERANCE = 1e-4
ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
SET: dict[str, Any] = {
    "vocabulary": VOCABULARY,
    "hidden": HIDDEN,
    "row": ROW,
    "default": DEFAULT,
    "most_gigabytes": MOST_GIGABYTES,
    "seconds_tokens": SECONDS_TOKENS,
    "repetitions": REPETITIONS,
    "deep_layers": DEEP_LAYERS,
    "deep_vocabulary": DEEP_VOCABULARY,
    "deep_tokens": DEEP_TOKENS,
}
"""What the page must say."""


def main() -> int:
    """Measures and writes the results. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="memory", help="name of the two files in docs/results")
    out = parser.parse_args().out
    multiprocessing.set_forkserver_preload(["engine.training.build"])
    results: dict[str, Any] = {"commit": commit(), "torch": torch.__version__, "set": SET}
    results["tokens"] = [compare(part, tokens) for part in ("head", "model") for tokens in TOKENS]
    results["rows"] = [{"rows": rows, **in_process("head", SECONDS_TOKENS, rows)} for rows in ROWS_AT_ONCE]
    results["seconds"] = alone(seconds)
    results["checkpointing"] = {name: alone(deep, on) for name, on in (("off", False), ("on", True))}
    wrong = verdict(results)
    write(out, {**results, "wrong": wrong}, page(results, wrong))
    return 1 if wrong else 0


def verdict(results: dict[str, Any]) -> list[str]:
    """Which bounds are missed."""
    wrong = []
    for part in ("head", "model"):
        *_, half, most = (cell for cell in results["tokens"] if cell["part"] == part)
        if most["plain"] is not None and most["parts"]["gigabytes"] > most["plain"]["gigabytes"] / 2:
            wrong.append(f"{part}: more than half of the memory of all logits at once")
        if part == "head" and most["parts"]["gigabytes"] > 1.1 * half["parts"]["gigabytes"]:
            wrong.append(f"{part}: memory grows with the tokens")
    if results["checkpointing"]["on"]["gigabytes"] >= results["checkpointing"]["off"]["gigabytes"]:
        wrong.append("gradient checkpointing saves nothing")
    return wrong


def compare(part: str, tokens: int) -> dict[str, Any]:
    """Both ways, each in a process of its own; None in place of what would not fit. RuntimeError where log-probs or gradients differ."""
    expected = TENSORS * tokens * VOCABULARY * 4 / 1e9
    fits = expected < min(MOST_GIGABYTES, available_gigabytes() - SPARE_GIGABYTES)
    found = {"plain": in_process(part, tokens, None) if fits else None, "parts": in_process(part, tokens, DEFAULT)}
    if fits:
        for what in ("log_prob", "gradient"):
            one, other = (way[what] for way in found.values() if way is not None)
            if abs(one - other) > TOLERANCE * abs(one):
                raise RuntimeError(f"{part}, {tokens} tokens: {what} is {one} in the plain way and {other} in parts")
    return {"part": part, "tokens": tokens, "expected_gigabytes": expected, **found}


# -- the two ways


def in_process(part: str, tokens: int, rows_at_once: int | None) -> dict[str, float]:
    """Peak, mean log-prob and size of the head's gradient of one way; `rows_at_once` of None is the plain one."""
    found: dict[str, float] = alone(measured, part, tokens, rows_at_once)
    return found


def measured(part: str, tokens: int, rows_at_once: int | None) -> dict[str, float]:
    """As above, inside the process."""
    causal = model(VOCABULARY, layers=2)
    return peak(causal, way(causal, part, tokens, rows_at_once))


def model(vocabulary: int, layers: int) -> Any:
    """A Qwen3 with random weights, an untied head, and gradients that are there already, as after an earlier micro-batch."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=layers,
        max_position_embeddings=ROW + 1,
        tie_word_embeddings=False,
        **ATTENTION,
    )
    causal = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
    for parameter in causal.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return causal


def batch_of(tokens: int, vocabulary: int) -> Batch:
    """Rows of a prompt of one token and ROW of response, so that the plain way loses nothing on prompts or padding."""
    ids = torch.randint(1, vocabulary, (max(1, tokens // ROW), min(tokens, ROW) + 1), generator=torch.Generator().manual_seed(1))
    attention = torch.ones_like(ids, dtype=torch.bool)
    response = attention.clone()
    response[:, 0] = False
    return ids, attention, response


def way(causal: Any, part: str, tokens: int, rows_at_once: int | None) -> Callable[[], torch.Tensor]:
    """A call that gives the log-probs of all response tokens. Of the head alone the decoder's states are given."""
    ids, attention, response = batch_of(tokens, VOCABULARY)
    states = torch.randn(*ids.shape, HIDDEN, generator=torch.Generator().manual_seed(2), requires_grad=True) if part == "head" else None
    if states is not None:
        causal.model.forward = lambda **_: _States(states)
    if rows_at_once is None:

        def plain() -> torch.Tensor:
            log_softmax = F.log_softmax(causal.lm_head(causal.model(input_ids=ids, use_cache=False).last_hidden_state)[:, :-1], dim=-1)
            return log_softmax.gather(-1, ids[:, 1:].unsqueeze(-1))

        return plain
    if part == "model":
        use_packed_attention(causal)
    policy = PolicyModel(causal, packed=part == "model", rows_at_once=rows_at_once)
    return lambda: policy(ids, attention, response, 1.0)[0][response]


class _States:
    """What a decoder returns."""

    def __init__(self, states: torch.Tensor) -> None:
        self.last_hidden_state = states


def deep(checkpointing: bool) -> dict[str, float]:
    """Peak and seconds of a deeper model with a small vocabulary."""
    causal = model(DEEP_VOCABULARY, DEEP_LAYERS)
    use_packed_attention(causal)
    if checkpointing:
        causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids, attention, response = batch_of(DEEP_TOKENS, DEEP_VOCABULARY)
    policy = PolicyModel(causal, packed=True, rows_at_once=DEFAULT)

    def one_pass() -> torch.Tensor:
        log_probs: torch.Tensor = policy(ids, attention, response, 1.0)[0]
        return log_probs[response]

    found = peak(causal, one_pass)
    return {**found, "processor_seconds": statistics.median(timed(one_pass)[1] for _ in range(REPETITIONS))}


def seconds() -> dict[str, Any]:
    """Forward and backward of the head in every way, in turns: seconds, and how many times as long as all logits at once."""
    ways: dict[str, Any] = {}
    for rows in (None, *ROWS_AT_ONCE):
        ways["plain" if rows is None else str(rows)] = way(model(VOCABULARY, layers=1), "head", SECONDS_TOKENS, rows)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    names = list(ways)
    for repetition in range(REPETITIONS):
        for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
            spent[name].append(timed(ways[name]))
    found: dict[str, Any] = {}
    for name, runs in spent.items():
        ratios = [[own / plain for own, plain in zip(*pair, strict=True)] for pair in zip(runs, spent["plain"], strict=True)]
        found[name] = {"seconds": statistics.median(wall for wall, _ in runs)}
        for column, key in enumerate(("ratio", "ratio_of_processor_seconds")):
            values = [ratio[column] for ratio in ratios]
            found[name][key] = {"median": statistics.median(values), "smallest": min(values), "largest": max(values)}
    return found


# -- the clock and the memory


def timed(one_pass: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Seconds of forward and backward: by the clock, and of the processors, which do not count a neighbour's work."""
    start, worked = time.perf_counter(), time.process_time()
    one_pass().mean().backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - start, time.process_time() - worked


def peak(causal: Any, one_pass: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Most resident memory in forward and backward above what was resident before, in GB; and what came out."""
    # Libraries make their threads and buffers at the first product.
    F.linear(torch.ones(64, HIDDEN), torch.ones(64, HIDDEN)).sum()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes what is resident now (proc(5)).
    before = status_gigabytes("VmHWM")
    log_probs = one_pass()
    log_probs.mean().backward()  # type: ignore[no-untyped-call]
    after = status_gigabytes("VmHWM")
    return {"gigabytes": after - before, "log_prob": float(log_probs.detach().mean()), "gradient": float(causal.lm_head.weight.grad.norm())}


def status_gigabytes(key: str) -> float:
    """Of this process, from /proc/self/status."""
    [kilobytes] = re.findall(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kilobytes) * 1024 / 1e9


def available_gigabytes() -> float:
    """Of the machine, from /proc/meminfo."""
    [kilobytes] = re.findall(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(kilobytes) * 1024 / 1e9


def alone(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a process of its own, which ends with it."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        found = pool.apply(call, arguments)
    print(call.__name__, arguments, found, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())

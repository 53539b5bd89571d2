"""What training without padding saves: share of real tokens in what is computed, balance of the ranks, and seconds, packed beside padded.

    python bench/packing.py [--out packing]

Response lengths are drawn as rollouts have them, seeded. Writes docs/results/packing.{json,md}; exits with 1 when less than 95 % of the tokens
that go through the decoder or are waited for are real, or when the fullest rank has over 3 % more tokens than the mean although another dealing
would not. Before seconds are measured, both ways must give the same log-probs and losses.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # Threads that wait sleep: else their processor time would count as work.

import numpy as np
import torch
import torch.distributed as dist
from packing_page import page
from report import commit, write
from transformers import AutoModelForCausalLM, Qwen3Config

from engine.batch import Batch
from engine.config import TrainingConfig
from engine.training.balance import balanced_order
from engine.training.build import build
from engine.training.micro_batches import micro_batches
from engine.training.packing import Packing
from engine.training.scoring import ResponseModel

CAP = 4096
"""Of a response, in tokens, where only lengths are looked at."""
PROMPT = (64, 512)
SAMPLES_PER_PROMPT = 8
RANKS, UPDATES, SAMPLES, BUDGETS = (2, 4, 8), (1, 2, 4), (256, 1024), (8192, 16384, 32768)
SEEDS = 60
KINDS = ("long tail", "uniform", "equal")
MINIMUM_SHARE, MAXIMUM_IMBALANCE = 0.95, 1.03

SPEED_CAP, SPEED_PROMPT, SPEED_SAMPLES, SPEED_BUDGET = 512, (16, 64), 24, 2048
REPETITIONS = 5
MODEL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
VOCABULARY = 1024
"""Small, so that the head is as small a part of the work as in models of some billion parameters (7 %)."""
TOLERANCE = 1e-4
"""Of a token's log-prob, and of the loss relative to its size, both in float32."""


SET: dict[str, Any] = {
    "cap": CAP,
    "prompt": PROMPT,
    "samples_per_prompt": SAMPLES_PER_PROMPT,
    "ranks": RANKS,
    "seeds": SEEDS,
    "minimum_share": MINIMUM_SHARE,
    "maximum_imbalance": MAXIMUM_IMBALANCE,
    "speed_cap": SPEED_CAP,
    "speed_prompt": SPEED_PROMPT,
    "speed_samples": SPEED_SAMPLES,
    "speed_budget": SPEED_BUDGET,
    "rows_as_they_come": SPEED_BUDGET // (SPEED_CAP + SPEED_PROMPT[1]),
    "repetitions": REPETITIONS,
    "vocabulary": VOCABULARY,
    **MODEL,
}
"""What the page must say."""


def main() -> int:
    """Measures and writes the results. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="packing", help="name of the two files in docs/results")
    out = parser.parse_args().out
    results: dict[str, Any] = {"commit": commit(), "torch": torch.__version__, "set": SET, "shares": shares()}
    results |= {"imbalance": imbalances((0, 0)), "imbalance_with_prompts": imbalances(PROMPT)}
    torch.set_num_threads(2)
    results["speed"] = [speed(kind) for kind in KINDS]
    wrong = verdict(results)
    write(out, {**results, "wrong": wrong}, page(results, wrong))
    return 1 if wrong else 0


# -- lengths


def lengths(kind: str, samples: int, seed: int, cap: int = CAP, prompt: tuple[int, int] = PROMPT) -> tuple[list[int], list[int]]:
    """Tokens of each sample's prompt and of its response; samples of one prompt follow each other, as the rollout leaves them.

    long tail: lognormal, median a sixth of the cap, sigma 1, cut off at the cap (4 % reach it). Half of the variance of the logarithm lies
    between prompts, since hard ones have long answers throughout. uniform: 1 to the cap. equal: half the cap.
    """
    random = np.random.default_rng([seed, samples])
    prompts = -(-samples // SAMPLES_PER_PROMPT)
    prompt_tokens = np.repeat(random.integers(*prompt, size=prompts, endpoint=True), SAMPLES_PER_PROMPT)[:samples]
    if kind == "long tail":
        hard = np.repeat(random.standard_normal(prompts), SAMPLES_PER_PROMPT)[:samples]
        response = cap / 6 * np.exp(np.sqrt(0.5) * (hard + random.standard_normal(samples)))
    elif kind == "uniform":
        response = random.integers(1, cap, size=samples, endpoint=True).astype(float)
    else:
        prompt_tokens[:] = sum(prompt) // 2
        response = np.full(samples, cap / 2)
    return prompt_tokens.tolist(), response.clip(1, cap).astype(int).tolist()


def batch_of(prompt: Sequence[int], response: Sequence[int], vocabulary: int = 2) -> Batch:
    """A batch of samples with these lengths, padded to the longest. Column `row` numbers them."""
    starts = torch.tensor(prompt).unsqueeze(1)
    ends = starts + torch.tensor(response).unsqueeze(1)
    position = torch.arange(int(ends.max()))
    attention = position < ends
    ids = torch.randint(1, vocabulary, attention.shape, generator=torch.Generator().manual_seed(0)) * attention
    columns = {"input_ids": ids, "attention_mask": attention, "response_mask": attention & (position >= starts)}
    return Batch(tensors={**columns, "row": torch.arange(len(prompt))})


# -- real tokens in what is computed


def shares() -> list[dict[str, Any]]:
    """Of every number of ranks, samples, updates and tokens a pass. The ranks are processes, which agree on the number of passes."""
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.set_forkserver_preload(["engine.training.build"])
        torch.multiprocessing.start_processes(  # type: ignore[attr-defined,no-untyped-call]
            rank_passes, args=(directory,), nprocs=max(RANKS), start_method="forkserver"
        )
        ranks = [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(max(RANKS))]
    results = []
    for number, cell in enumerate(cells()):
        mini_batches = list(zip(*(rank[number] for rank in ranks[: cell["ranks"]]), strict=True))
        found = {}
        for way in ("packed", "padded"):
            ways = [[rank[way] for rank in mini_batch] for mini_batch in mini_batches]  # [update][rank][pass] of (real, computed)
            passes = [one for update in ways for rank in update for one in rank]
            real, computed = (sum(column) for column in zip(*passes, strict=True))
            waited = sum(cell["ranks"] * max(rank[at][1] for rank in update) for update in ways for at in range(len(update[0])))
            found[way] = {"computed": real / computed, "waited_for": real / waited, "passes_of_a_rank": len(passes) / cell["ranks"]}
        results.append({**cell, **found})
    return results


def cells() -> list[dict[str, Any]]:
    """What is measured, in order."""
    return [
        {"kind": kind, "ranks": ranks, "samples": samples, "updates": updates, "budget": budget}
        for kind in KINDS
        for samples in SAMPLES
        for updates in UPDATES
        for budget in BUDGETS
        for ranks in RANKS
        if kind == "long tail" or (samples, updates, budget) == (1024, 1, 16384)
    ]


def rank_passes(rank: int, directory: str) -> None:
    """One rank: real and computed tokens of each of its passes, both ways, for each update of each cell in which it takes part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=max(RANKS))
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in RANKS}
    found: list[list[dict[str, list[tuple[int, int]]]]] = []
    for cell in cells():
        found.append([])
        if rank >= cell["ranks"]:
            continue
        prompt, response = lengths(cell["kind"], cell["samples"], seed=0)
        totals = [one + other for one, other in zip(prompt, response, strict=True)]
        order = balanced_order(totals, cell["ranks"], cell["updates"])
        rows = torch.tensor(order).view(cell["ranks"], cell["updates"], -1)[rank].tolist()
        for own in rows:
            batch = batch_of([prompt[row] for row in own], [response[row] for row in own])
            ways = {}
            for way in ("packed", "padded"):
                parts = micro_batches(batch, cell["budget"], padded=way == "padded", group=groups[cell["ranks"]])
                ways[way] = [tokens_of(part.tensors["attention_mask"], way == "packed") for part in parts]
            found[-1].append(ways)
    (Path(directory) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def tokens_of(attention_mask: torch.Tensor, packed: bool) -> tuple[int, int]:
    """Real tokens of a pass, and tokens that its decoder computes."""
    return int(attention_mask.sum()), sum(Packing.of(attention_mask).lengths) if packed else attention_mask.numel()


# -- balance of the ranks


def imbalances(prompt: tuple[int, int]) -> list[dict[str, Any]]:
    """The fullest rank's tokens over the mean in an update: balanced, and in contiguous shares as the rollout leaves them.

    For every update that is not below the maximum the bound of any dealing stands beside it.
    """
    results = []
    for samples in SAMPLES:
        for updates in UPDATES:
            for ranks in RANKS:
                balanced, contiguous, least = [], [], []
                for seed in range(SEEDS):
                    totals = np.array(lengths("long tail", samples, seed, prompt=prompt)).sum(axis=0)
                    balanced += over_mean(totals[balanced_order(totals.tolist(), ranks, updates)], ranks, updates)
                    contiguous += over_mean(totals, ranks, updates)
                    least += [least_over_mean(part.tolist(), ranks) for part in totals.reshape(updates, -1)]
                cell: dict[str, Any] = {
                    "samples": samples,
                    "updates": updates,
                    "ranks": ranks,
                    "rows": samples // updates // ranks,
                    "cases": len(balanced),
                }
                cell |= {"balanced_largest": max(balanced), "balanced_median": statistics.median(balanced)}
                cell |= {"contiguous_largest": max(contiguous), "contiguous_median": statistics.median(contiguous)}
                over = [(got, bound) for got, bound in zip(balanced, least, strict=True) if got > MAXIMUM_IMBALANCE]
                results.append({**cell, "over": over, "over_needlessly": sum(got > bound * 1.001 for got, bound in over)})
    return results


def over_mean(totals: np.ndarray[Any, Any], ranks: int, updates: int) -> list[float]:
    """Of each update: the largest of the ranks' sums over their mean."""
    sums = totals.reshape(ranks, updates, -1).sum(axis=-1)
    return list(map(float, sums.max(axis=0) / sums.mean(axis=0)))


def least_over_mean(totals: list[int], ranks: int) -> float:
    """A bound from below for any dealing of equally many rows: of the i longest, one rank gets i / ranks, and its other rows are the shortest."""
    ascending, rows = sorted(totals), len(totals) // ranks
    bound = max((count := -(-i // ranks)) * ascending[-i] + sum(ascending[: rows - count]) for i in range(1, len(totals) + 1))
    return max(1.0, bound / (sum(totals) / ranks))


# -- seconds


def speed(kind: str) -> dict[str, Any]:
    """Forward and backward of the same samples in three ways, in turns. RuntimeError where their log-probs or losses differ."""
    batch = batch_of(*lengths(kind, SPEED_SAMPLES, 0, SPEED_CAP, SPEED_PROMPT), vocabulary=VOCABULARY)
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        config = Qwen3Config(vocab_size=VOCABULARY, max_position_embeddings=2 * SPEED_CAP, tie_word_embeddings=False, **MODEL)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        packed, padded = (build(Path(directory), "policy", TrainingConfig(pack_sequences=pack), torch.float32) for pack in (True, False))
    rows = SET["rows_as_they_come"]
    ways = {
        "packed": (packed, micro_batches(batch, SPEED_BUDGET, padded=False, group=None)),
        "padded": (padded, micro_batches(batch, SPEED_BUDGET, padded=True, group=None)),
        "as_they_come": (padded, [cut(batch, range(at, min(at + rows, len(batch)))) for at in range(0, len(batch), rows)]),
    }
    found, shares = {}, {}
    for way, (model, parts) in ways.items():  # Once outside the clock, which also makes what later passes use again.
        with decoder_tokens(model) as computed:
            found[way] = step(model, parts, batch)
        assert computed == [tokens_of(part.tensors["attention_mask"], way == "packed")[1] for part in parts], f"{way}: other tokens than counted"
        shares[way] = int(batch.tensors["attention_mask"].sum()) / sum(computed)
    difference = agree(found)
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}  # By the clock on the wall, and of the processors.
    for repetition in range(REPETITIONS):
        for way in [*ways][repetition % 3 :] + [*ways][: repetition % 3]:
            model, parts = ways[way]
            start, worked = time.perf_counter(), time.process_time()
            step(model, parts, batch)
            seconds[way].append((time.perf_counter() - start, time.process_time() - worked))
    ratios = {
        way: [[other / own for other, own in zip(*pair, strict=True)] for pair in zip(seconds[way], seconds["packed"], strict=True)]
        for way in ("padded", "as_they_come")
    }
    return {
        "kind": kind,
        "tokens": int(batch.tensors["attention_mask"].sum()),
        "computed_share": shares,
        "seconds": {way: statistics.median(wall for wall, _ in spent) for way, spent in seconds.items()},
        "ratio": {way: spread([wall for wall, _ in one]) for way, one in ratios.items()},
        "ratio_of_processor_seconds": {way: spread([worked for _, worked in one]) for way, one in ratios.items()},
        "largest_difference": difference,
    }


def spread(values: list[float]) -> dict[str, float]:
    """What is kept of repetitions."""
    return {"median": statistics.median(values), "smallest": min(values), "largest": max(values)}


@contextmanager
def decoder_tokens(model: ResponseModel) -> Iterator[list[int]]:
    """The number of tokens that enter the decoder in each pass, seen at its embedding."""
    seen: list[int] = []
    handle = model.causal.get_input_embeddings().register_forward_hook(lambda _, __, states: seen.append(states[..., 0].numel()))
    try:
        yield seen
    finally:
        handle.remove()


def cut(batch: Batch, rows: range) -> Batch:
    """Rows in a pass of their own, as wide as the longest."""
    part = batch.rows(torch.tensor(rows))
    longest = int(part.tensors["attention_mask"].sum(dim=1).max())
    return part.with_tensors(**{name: tensor[:, :longest] for name, tensor in part.tensors.items() if tensor.ndim > 1})


def step(model: torch.nn.Module, parts: list[Batch], batch: Batch) -> tuple[float, torch.Tensor]:
    """Forward and backward of all parts on a policy-gradient loss; the loss, and the log-probs [B, T] of the whole batch."""
    model.zero_grad(set_to_none=True)
    tokens = int(batch.tensors["response_mask"].sum())
    loss, log_probs = 0.0, torch.zeros(batch.tensors["input_ids"].shape)
    for part in parts:
        columns = [part.tensors[name] for name in ("input_ids", "attention_mask", "response_mask")]
        found, _ = model(*columns, 1.0)
        advantages = part.tensors["row"] % 3 - 1.0
        part_loss = -(found * advantages.unsqueeze(1)).sum() / tokens
        part_loss.backward()
        loss += float(part_loss.detach())
        log_probs[part.tensors["row"], : found.shape[1]] = found.detach()
    return loss, log_probs


def agree(found: dict[str, tuple[float, torch.Tensor]]) -> float:
    """The largest difference of a token's log-prob between the ways. RuntimeError where it, or that of the losses, is too large."""
    loss, log_probs = found["packed"]
    largest = max(float((other - log_probs).abs().max()) for _, other in found.values())
    if largest > TOLERANCE or any(abs(other - loss) > TOLERANCE * abs(loss) for other, _ in found.values()):
        raise RuntimeError(f"the ways disagree: losses {[loss for loss, _ in found.values()]}, log-probs by up to {largest}")
    return largest


def verdict(results: dict[str, Any]) -> list[str]:
    """Which bounds are missed."""
    wrong = [name(cell) + ": padding" for cell in results["shares"] if min(cell["packed"]["computed"], cell["packed"]["waited_for"]) < MINIMUM_SHARE]
    cells = results["imbalance"] + results["imbalance_with_prompts"]
    return wrong + [name(cell) + ": out of balance" for cell in cells if cell["over_needlessly"]]


def name(cell: dict[str, Any]) -> str:
    """What was measured there, in words."""
    return f"{cell.get('kind', 'balance')}, {cell['samples']} samples, {cell['updates']} updates, {cell['ranks']} ranks"


if __name__ == "__main__":
    sys.exit(main())

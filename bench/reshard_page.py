"""The page of bench/reshard.py. Every outcome in it comes from the results."""

import statistics
from typing import Any

from report import table

NAMES = {
    "gather_float32": "gather in float32, then cast",
    "gather_cast": "cast, then gather",
    "checkpoint": "checkpoint, cast before",
    "resharded": "resharded",
}
MODELS = {"smollm2": "SmolLM2-135M", "qwen3": "Qwen3, 0.5 B"}
PHASES = ("transfer", "loading", "packing", "proof", "waiting")
PAGE = """# What a synchronisation costs

`python bench/reshard.py`, commit {commit}, PyTorch {torch}.

From float32 shards of FSDP2 to vLLM engines in the same processes (gloo over the loopback, no GPU), in several ways. *SmolLM2-135M* is the real
one, with a tied head; *Qwen3* has random weights: the decoder of Qwen3-0.6B ({num_hidden_layers} layers, hidden {hidden_size},
{num_attention_heads} heads, {num_key_value_heads} key-value heads), vocabulary {vocab_size} and a head of its own, {billions:.2f} billion
parameters. *TP* is how many ranks share an engine; vLLM divides SmolLM2's 9 heads by 3 only. *Type* is the rollout's.

Each case is {repetitions} repetitions in one set of processes, in which the ways take turns in rotated order, after one round that does not count.
Before every turn all weights are changed; after it the engine's greedy tokens and log-probs must be the trainer's within {allowed} (they were
within {difference:.3f}), and to the last bit those of the other ways with the same weights. In float32 the first two ways are the same.

- *Gather*: every tensor is made whole on every rank, one after the other, and given to vLLM's loaders.
- *Checkpoint*: gathered, written to a file by rank 0 without reading it back, and read by every rank.

{verdict}

## Seconds

Medians (smallest to largest) until the last rank is done, on {cores} cores for all ranks, on a machine that others use too: processor seconds, of all
ranks together, are the steadier measure. The shares are those of the median repetition, on the mean rank: *packing* is what oneDNN's kernels need
(the share that no way of moving can save), *loading* is vLLM's loaders, and *transfer* is what it takes to have the tensors, waiting for other ranks
included. *Transfer alone* is the same without an engine to load, so without that waiting.

{seconds_table}

{packing}

## Bytes and memory

Of the rank that has most. *Bound*: what an engine's rank needs beyond what it holds. *Memory* is the most that is resident during the turn, above
what was before, buckets included; of the checkpoint the mapped file counts, which the ranks share.

{bytes_table}

## Bytes by ranks and TP

Of Qwen3 in bfloat16, counted and not measured: what the rank receives that receives most. *Planned* is `engine/reshard/plan.py`, for shards in the
order and placement that it proposes.

![bytes received]({out}_bytes.png)

![seconds]({out}_seconds.png)
"""


def page(results: dict[str, Any], out: str) -> str:
    """The results as Markdown."""
    cases = results["cases"]
    return PAGE.format(
        **results["set"],
        commit=results["commit"],
        torch=results["torch"],
        cores=results["cores"],
        billions=results["bytes"][0]["parameters"] / 1e9,
        allowed=" and ".join(f"{tolerance:g} in {dtype}" for dtype, tolerance in results["set"]["tolerances"].items()),
        difference=max(case["largest_difference"] for case in cases),
        seconds_table=seconds_table(cases, results["reference"]),
        packing=packing(cases),
        verdict="\n".join(f"- {'holds' if holds else '**does not hold**'}: {claim}" for claim, holds in results["verdict"].items()),
        bytes_table=bytes_table(cases),
        out=out,
    )


def seconds_table(cases: list[dict[str, Any]], reference: str) -> str:
    """One row a case and way."""
    header = ["model", "type", "way", "ranks", "TP", "seconds", "processor seconds", *PHASES, "transfer alone", f"{NAMES[reference]} = 1"]
    header.append("in processor seconds")
    rows = []
    for case in cases:
        for way, found in case["ways"].items():
            phases = middle(found)
            ratios = [spread(ratio(found[key], case["ways"][reference][key]), "") for key in ("seconds", "processor")]
            shares = [f"{phases[phase] / sum(phases.values()):.0%}" for phase in PHASES]
            words, numbers = [MODELS[case["model"]], case["dtype"], NAMES[way]], [case["ranks"], case["parts"]]
            measured = [spread(found["seconds"], " s"), spread(found["processor"], " s"), *shares, spread(found["transfer_alone"], " s")]
            rows.append([*words, *numbers, *measured, *ratios])
    return table(header, rows, words=3)


def bytes_table(cases: list[dict[str, Any]]) -> str:
    """One row a case and way."""
    header = ["model", "type", "way", "ranks", "TP", "received", "bound", "read from the file", "memory"]
    rows = []
    for case in cases:
        for way, found in case["ways"].items():
            sizes = [max(found["received"]), case["bound"], max(found["read"]), statistics.median(found["peak"])]
            words, numbers = [MODELS[case["model"]], case["dtype"], NAMES[way]], [case["ranks"], case["parts"]]
            rows.append([*words, *numbers, *(f"{size / 1e9:.3f} GB" if size else "0" for size in sizes)])
    return table(header, rows, words=3)


def packing(cases: list[dict[str, Any]]) -> str:
    """The share that every way has in common."""
    lines = []
    for case in cases:
        phases = {way: middle(found) for way, found in case["ways"].items()}
        said = ", ".join(f"{one['packing']:.2f} s or {one['packing'] / sum(one.values()):.0%} ({NAMES[way]})" for way, one in phases.items())
        lines.append(f"- {MODELS[case['model']]}, {case['dtype']}, {case['ranks']} ranks, TP {case['parts']}: packing takes {said}.")
    return "\n".join(lines)


def middle(found: dict[str, Any]) -> dict[str, float]:
    """Phases of the repetition that took the median time, of those with an even number the quicker one."""
    order = sorted(range(len(found["seconds"])), key=found["seconds"].__getitem__)
    return {phase: found[phase][order[(len(order) - 1) // 2]] for phase in PHASES}


def ratio(numbers: list[float], others: list[float]) -> list[float]:
    """Of each repetition."""
    return [one / other for one, other in zip(numbers, others, strict=True)]


def spread(numbers: list[float], unit: str) -> str:
    """Median (smallest to largest)."""
    return f"**{statistics.median(numbers):.2f}{unit}** ({min(numbers):.2f} to {max(numbers):.2f})"

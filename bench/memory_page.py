"""The page of bench/memory.py. Every outcome in it comes from the results."""

from typing import Any

from report import table

PAGE = """# Memory of log-probs

`python bench/memory.py`, commit {commit}, PyTorch {torch}. Verdict: {verdict}.

Logits of one response token are as many numbers as the vocabulary has tokens, and a pass needs them several times. The *plain* way makes those of
all tokens, then log_softmax, then picks one; *in parts* is what the engine does (`engine/training/scoring.py`): the logits of
`training.logits_rows_at_once` tokens exist at a time, and are made again in the backward pass. Vocabulary {vocabulary}, hidden {hidden}, float32, an
untied head, rows of at most {row} response tokens without padding. In parts the entropy is computed too, which the plain way leaves out.

Memory is the most that is resident during forward and backward, above what was resident before; model and gradients are there before. Every
number is a process of its own. The plain way is left out where it would take more than {most_gigabytes:.0f} GB or than the machine has. Both ways
gave the same mean log-prob, and a gradient of the head of the same size; that they agree in every token is a test's business. With no more tokens
than go at once nothing is in parts, and nothing is saved.

## Plain, and in parts of {default} tokens

{tokens_table}

## How many at once

Of the head alone, {seconds_tokens} response tokens. Seconds are those of forward and backward, in turns in one process with 2 threads on a
machine that others use too, {repetitions} repetitions: how many times as long as the plain way, median (smallest to largest), by the clock and
in processor seconds. What parts cost is making the logits again, the entropy, and a sum of the head's gradients for each part.

{rows_table}

{choice}

Smaller parts mean more sums of the head's gradient (vocabulary times hidden) and smaller matrix products, which keep an accelerator less busy: that
is not measured here, and the reason why the default is not smaller still.

## Gradient checkpointing

A Qwen3 of {deep_layers} layers, hidden {hidden}, vocabulary {deep_vocabulary}, {deep_tokens} tokens in one packed pass.
`training.gradient_checkpointing` takes {memory_share:.0%} of the memory and {seconds_ratio:.2f} times the processor seconds.

{deep_table}
"""


def page(results: dict[str, Any], wrong: list[str]) -> str:
    """The results as Markdown."""
    deep = results["checkpointing"]
    return PAGE.format(
        **results["set"],
        commit=results["commit"],
        torch=results["torch"],
        verdict="; ".join(wrong) or "all bounds are kept",
        tokens_table=tokens_table(results["tokens"]),
        rows_table=rows_table(results),
        choice=choice(results),
        memory_share=deep["on"]["gigabytes"] / deep["off"]["gigabytes"],
        seconds_ratio=deep["on"]["processor_seconds"] / deep["off"]["processor_seconds"],
        deep_table=table(
            ["gradient checkpointing", "memory", "processor seconds"],
            [[name, f"{one['gigabytes']:.2f} GB", f"{one['processor_seconds']:.2f} s"] for name, one in deep.items()],
        ),
    )


def tokens_table(cells: list[dict[str, Any]]) -> str:
    """One row a model and number of tokens."""
    rows = []
    for cell in cells:
        plain, parts = cell["plain"], cell["parts"]["gigabytes"]
        words = {"head": "head alone", "model": "two layers and head"}[cell["part"]]
        beside = ["would not fit", ""] if plain is None else [f"{plain['gigabytes']:.2f} GB", f"{parts / plain['gigabytes']:.0%}"]
        rows.append([words, cell["tokens"], beside[0], f"{parts:.2f} GB", beside[1]])
    return table(["model", "response tokens", "plain", "in parts", "in parts / plain"], rows)


def rows_table(results: dict[str, Any]) -> str:
    """One row a number of tokens at once; the last is the plain way."""
    at = ("head", results["set"]["seconds_tokens"])
    [plain] = (cell["plain"] for cell in results["tokens"] if (cell["part"], cell["tokens"]) == at)
    memory = {str(cell["rows"]): f"{cell['gigabytes']:.2f} GB" for cell in results["rows"]}
    memory["plain"] = "would not fit" if plain is None else f"{plain['gigabytes']:.2f} GB"
    rows = []
    for name, gigabytes in memory.items():
        one = results["seconds"][name]
        rows.append([name, gigabytes, f"{one['seconds']:.1f} s", *(spread(one[key]) for key in ("ratio", "ratio_of_processor_seconds"))])
    return table(["tokens at once", "memory", "seconds", "times as long as plain", "in processor seconds"], rows)


def spread(values: dict[str, float]) -> str:
    """The median, and how far repetitions lie apart."""
    return f"**{values['median']:.2f}** ({values['smallest']:.2f} to {values['largest']:.2f})"


def choice(results: dict[str, Any]) -> str:
    """What the default takes, beside its neighbours."""
    default = results["set"]["default"]
    memory = {cell["rows"]: cell["gigabytes"] for cell in results["rows"]}
    times = {name: one["ratio_of_processor_seconds"]["median"] for name, one in results["seconds"].items()}
    one = results["seconds"][str(default)]["ratio_of_processor_seconds"]
    apart = one["largest"] - one["smallest"]
    noise = all(abs(times[str(rows)] - times[str(default)]) < apart for rows in memory)
    others = [
        f"- {rows} at once take {memory[rows] / memory[default]:.2f} times its memory and "
        f"{times[str(rows)] / times[str(default)]:.2f} times its processor seconds"
        for rows in memory
        if rows != default
    ]
    end = "\n\nThe seconds of these differ by less than those of repetitions." if noise else ""
    return f"The default is {default}. Beside it\n\n" + ";\n".join(others) + "." + end

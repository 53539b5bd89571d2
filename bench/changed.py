"""How much of a model changes, in the type that travels, with a step of AdamW; and what a changed-only synchronisation of it takes.

    python bench/changed.py [--model DIRECTORY] [--steps 1 10]

Without a directory: a random Qwen3 of 9 M parameters. Prints a row of a Markdown table for each learning rate and step.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from engine.reshard.wire import changes

LEARNING_RATES = (1e-6, 1e-5, 1e-4)
ROWS, TOKENS = 8, 64
SIZES = {"vocab_size": 8_000, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 128}


def changed_share(before: torch.Tensor, now: torch.Tensor) -> tuple[float, float]:
    """Of bfloat16 tensors: the share of elements that changed, and bytes of the changed form in those of `now`, at most 1."""
    old, new = before.flatten().view(torch.int16), now.flatten().view(torch.int16)
    found = changes(new, old)
    size = new.nbytes if found is None else sum(part.nbytes for part in found)
    return float((new != old).float().mean()), size / new.nbytes


def measured(model: PreTrainedModel, learning_rate: float, steps: int) -> tuple[float, float]:
    """`changed_share` of all weights over the last of so many steps, without weight decay, on random tokens that are others each time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    before = torch.empty(0)
    for step in range(steps):
        if step == steps - 1:
            before = cast(model)
        ids = torch.randint(0, model.config.vocab_size, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return changed_share(before, cast(model))


def cast(model: PreTrainedModel) -> torch.Tensor:
    """All weights as they travel."""
    return torch.cat([parameter.detach().to(torch.bfloat16).flatten() for parameter in model.parameters()])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10])
    arguments = parser.parse_args()
    for steps in arguments.steps:
        for learning_rate in LEARNING_RATES:
            torch.manual_seed(0)
            if arguments.model:
                model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
            else:
                model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES), dtype=torch.float32)
            share, size = measured(model, learning_rate, steps)
            print(f"| {learning_rate:g} | {steps} | {share:.2%} | {size:.2%} |", flush=True)


if __name__ == "__main__":
    main()

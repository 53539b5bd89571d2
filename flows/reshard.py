"""`almanac reshard-plan`: what a synchronisation of a model's weights has to move, as tables for people and as JSON."""

import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

from tasks.show import size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from engine.reshard.build import Colocated
    from engine.reshard.plan import Plan

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
"""vLLM is only asked how it loads, and computes nothing."""

NOTES = (
    "bound: what a rank needs beyond all that it holds; full gather: every tensor whole, in float32.",
    "A run whose training and rollout are divided so follows this plan; `almanac show` says what its synchronisations moved.",
)


def plan(model: str, ranks: int, parts: int, bucket_megabytes: float, dtype: str) -> "Colocated":
    """The plan for `ranks` that train with FSDP and generate with vLLM engines of `parts` ranks.

    Raises:
        ValueError: an argument makes no sense, or the model is not known or cannot be divided so.
    """
    for option, value in (("--fsdp", ranks), ("--tp", parts), ("--bucket-megabytes", bucket_megabytes)):
        if not value > 0:
            raise ValueError(f"{option} {value}: must be more than 0")
    if ranks % parts:
        raise ValueError(f"--tp {parts} does not divide --fsdp {ranks}, and they are the same ranks; choose a divisor")
    for name, setting in QUIET.items():
        os.environ.setdefault(name, setting)
    config = _configuration(model)
    # What libraries say belongs to the other stream: this one may be read by a program.
    with redirect_stdout(sys.stderr):
        import torch

        from engine.reshard.build import colocated

        return colocated(config, getattr(torch, dtype), ranks, parts, int(bucket_megabytes * 1e6))


def summary(planned: "Colocated") -> dict[str, Any]:
    """All numbers, bytes unless the name says otherwise."""
    return {
        "parameters": planned.parameters,
        "plan": _numbers(planned.plan),
        "fsdp_order": _numbers(planned.fsdp_order),
        "shard_of_rank": [shard for _, shard in sorted((group[0], s) for copy in planned.sharding.mesh for s, group in enumerate(copy))],
        "shard_dimension": dict(planned.sharding.shard_dimension),
    }


def table(planned: "Colocated", model: str) -> Group:
    """Bytes by rank, and what the whole takes. Neighbouring ranks with equal numbers share a line."""
    best, plain = planned.plan, planned.fsdp_order
    ranks = Table(box=None, padding=(0, 2, 0, 0), title=f"{model}: {planned.parameters:,} parameters", title_justify="left")
    for name in ("ranks", "needs", "holds", "bound", "receives", "ratio", "in FSDP's order", "full gather"):
        ranks.add_column(name, justify="right")
    for name, rank in _alike(best, plain):
        volumes = best.volumes[rank]
        received, usual = volumes.received, plain.volumes[rank].received
        numbers = (volumes.needed, volumes.held, volumes.bound, received)
        ranks.add_row(name, *map(size, numbers), _ratio(received, volumes.bound), size(usual), size(volumes.full_gather))
    whole = Table.grid(padding=(0, 3, 0, 0))
    for text, value in (
        ("received by all ranks", size(sum(volumes.received for volumes in best.volumes.values()))),
        ("sends", f"{best.messages} with {best.pieces} slices, in {len(best.rounds)} rounds"),
        ("bucket of a rank and round, both directions", f"at most {size(best.bucket_bytes)}"),
        ("peak buffer, two rounds in flight", size(best.peak_buffer)),
        ("largest slice", size(best.largest_slice)),
        ("parameters divided along another dimension than 0", str(len(planned.sharding.shard_dimension))),
    ):
        whole.add_row(text, value)
    return Group(ranks, "", whole, "", *NOTES)


def _configuration(model: str) -> "PreTrainedConfig":
    from transformers import AutoConfig

    from engine import model as models
    from engine.config import ModelConfig
    from engine.published import SHAPES
    from tasks.compose import choices, model_of

    files = choices("model")
    named = model_of(model) if model in files else ModelConfig(path=model)
    if named.path is not None and not (Path(named.path) / "config.json").is_file():
        if named.path not in SHAPES:
            there_are = ", ".join([*files, *SHAPES])
            raise ValueError(f"{model} is no model: choose one of {there_are}, or a directory with a config.json")
        shape = dict(SHAPES[named.path])
        return AutoConfig.for_model(shape.pop("model_type"), **shape)
    return models.configuration(named)


def _numbers(plan: "Plan") -> dict[str, Any]:
    return {
        "ranks": {str(rank): asdict(volumes) for rank, volumes in plan.volumes.items()},
        "sends": plan.messages,
        "slices": plan.pieces,
        "rounds": len(plan.rounds),
        "bucket": plan.bucket_bytes,
        "peak_buffer": plan.peak_buffer,
        "largest_slice": plan.largest_slice,
    }


def _alike(best: "Plan", plain: "Plan") -> Iterator[tuple[str, int]]:
    """Runs of ranks with equal numbers but for what they send, each with its first rank."""

    def numbers(rank: int) -> tuple[int, ...]:
        volumes = best.volumes[rank]
        return volumes.needed, volumes.held, volumes.received, plain.volumes[rank].received

    for _, run in groupby(best.volumes, key=numbers):
        ranks = list(run)
        yield (str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"), ranks[0]


def _ratio(received: int, bound: int) -> str:
    return f"{received / bound:.3f}" if bound else ("1.000" if not received else "none due")

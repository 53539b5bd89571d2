"""From a model's configuration to the plan of its synchronisation: training and generation on the same ranks."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from engine.reshard.checkpoint import Checkpoint, checkpoint_of
from engine.reshard.layout import Layout, Sharding, contained_mesh, divisible, plain_mesh, row_dimensions, training_layout
from engine.reshard.plan import Plan, make_plan
from engine.reshard.rollout_layout import rollout_layout


@dataclass(frozen=True, slots=True)
class Colocated:
    """The plan for shards in the order and placement that contain most, beside the one for FSDP's own."""

    plan: Plan
    fsdp_order: Plan
    """Shards by rank number, every parameter divided along dimension 0: what `fully_shard` does when it is not told otherwise."""
    sharding: Sharding
    parameters: int
    """Elements of the checkpoint."""


def colocated(config: PreTrainedConfig, dtype: torch.dtype, ranks: int, parts: int, bucket_bytes: int) -> Colocated:
    """FSDP over all `ranks`, which are also `ranks / parts` vLLM engines of `parts` ranks each. Takes no memory to speak of.

    Raises ValueError where `parts` does not divide `ranks`, or vLLM cannot divide the model so.
    """
    if ranks % parts:
        raise ValueError(f"--tp {parts} does not divide --fsdp {ranks}: they are the same ranks; choose a divisor")
    checkpoint = checkpoint_of(config, dtype)
    rollout = rollout_layout(config, checkpoint.tensors, dtype, parts, range(ranks))
    plain = Sharding(plain_mesh(ranks, ranks), {}, {})
    sharding = best_sharding(checkpoint, rollout, ranks, ranks, parts)
    return Colocated(
        plan=make_plan(_layout(checkpoint, sharding), rollout, bucket_bytes),
        fsdp_order=make_plan(_layout(checkpoint, plain), rollout, bucket_bytes),
        sharding=sharding,
        parameters=sum(tensor.elements for tensor in checkpoint.tensors.values()),
    )


def best_sharding(checkpoint: Checkpoint, rollout: Layout, ranks: int, shards: int, parts: int) -> Sharding:
    """Shards that lie inside what their ranks need, as far as FSDP2 can make them; hybrid sharding where `shards` is less than `ranks`.

    Where the three numbers do not divide each other nothing is gained by an order, and it is that of the ranks.
    """
    try:
        mesh = contained_mesh(ranks, shards, parts)
    except ValueError:
        return Sharding(plain_mesh(ranks, shards), {}, {})
    even = Sharding(mesh, {}, {})
    rows = row_dimensions(rollout, checkpoint.parts, checkpoint.parameters, lambda name, tensor, dimension: divisible(name, tensor, dimension, even))
    return Sharding(mesh, rows, {})


def _layout(checkpoint: Checkpoint, sharding: Sharding) -> Layout:
    return training_layout(checkpoint.tensors, checkpoint.parts, checkpoint.parameters, sharding)

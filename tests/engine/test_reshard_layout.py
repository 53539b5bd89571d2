"""Layouts against what the real parts hold: DTensors that FSDP2 cut, parameters that vLLM's loaders filled.

Every element carries a number of its own. The layout says which number must lie where; here the real thing is looked into.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, PreTrainedConfig

from engine.reshard.build import best_sharding
from engine.reshard.checkpoint import checkpoint_of
from engine.reshard.layout import Part, Sharding, Tensor, contained_mesh, cut, cuts, plain_mesh, training_layout, volume, without
from engine.reshard.plan import make_plan
from engine.reshard.rollout_layout import rank_models, record, rollout_layout
from engine.training.shards import device_mesh

TINY = {
    "vocab_size": 131,  # odd: vLLM pads it to 192
    "hidden_size": 64,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # of which four ranks hold copies
    "head_dim": 32,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"hidden_size": 128, "layer_types": None},
    "llama": {},
    "gemma3_text": {"sliding_window": 32},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "decoder_sparse_step": 1},
}
CASES = [
    *((family, tied, parts) for family in ("qwen3", "llama") for tied in (True, False) for parts in (1, 2, 4)),
    *(("qwen2", False, parts) for parts in (1, 2, 4)),
    *(("gemma3_text", True, parts) for parts in (1, 2, 4)),
    *(("qwen3_moe", False, parts) for parts in (1, 2, 4)),
]


def config_of(family: str, tied: bool) -> PreTrainedConfig:
    values = TINY | FAMILIES[family] | {"tie_word_embeddings": tied}
    return AutoConfig.for_model(family, **{key: value for key, value in values.items() if value is not None})


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ProcessPoolExecutor]:
    """A process that may import vLLM and be changed by it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=quiet) as executor:
        yield executor


def quiet() -> None:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)


def loaded_as_recorded(family: str, tied: bool, parts: int) -> list[str]:
    """Loads numbers into vLLM's parameters on the host; names those that differ from what the recording of the meta model says."""
    config = config_of(family, tied)
    checkpoint = checkpoint_of(config, torch.float32)
    ends = torch.tensor([tensor.elements for tensor in checkpoint.tensors.values()]).cumsum(0)
    assert int(ends[-1]) < 2**24  # Beyond, float32 does not tell numbers apart.
    numbers = {
        name: torch.arange(int(end) - tensor.elements + 1, int(end) + 1, dtype=torch.float32).reshape(tensor.shape)
        for (name, tensor), end in zip(checkpoint.tensors.items(), ends, strict=True)
    }
    wrong = []
    said = [record(model, checkpoint.tensors).copies for model in rank_models(config, torch.float32, parts, torch.device("meta"))]
    for name, tensor in checkpoint.tensors.items():
        if without([tensor.whole], [copy.source for copies in said for copy in copies if copy.tensor == name]):
            wrong.append(f"no rank needs all of {name}")
    # The four heads of 32 features, in the order of the ranks.
    tensor = checkpoint.tensors["model.layers.1.self_attn.q_proj.weight"]
    queries = [copy.source[0] for copies in said for copy in copies if copy.tensor == "model.layers.1.self_attn.q_proj.weight"]
    if queries != [(rank * tensor.shape[0] // parts, (rank + 1) * tensor.shape[0] // parts) for rank in range(parts)]:
        wrong.append(f"queries {queries}")
    for rank, model in enumerate(rank_models(config, torch.float32, parts, torch.device("cpu"))):
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            parameter.data.fill_(-1)
        model.load_weights(iter((name, tensor.clone()) for name, tensor in numbers.items()))
        expected = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}  # padding
        for copy in said[rank]:
            source = numbers[copy.tensor][tuple(slice(*bounds) for bounds in copy.source)]
            target = expected[copy.parameter][tuple(slice(*bounds) for bounds in copy.target)]
            target.copy_(source.reshape(target.shape))
        wrong += [f"rank {rank}: {name}" for name, parameter in parameters.items() if not parameter.data.equal(expected[name])]
    return wrong


@pytest.mark.parametrize(("family", "tied", "parts"), CASES)
def test_vllm_computes_with_what_the_layout_says(elsewhere: ProcessPoolExecutor, family: str, tied: bool, parts: int) -> None:
    """Fused qkv and gate-up, copied kv heads, biases, padded vocabulary, experts; vLLM's own loaders on numbers, in the host's memory.

    Mutations tried: every rank built as rank 0 (`_group(0, parts)`) leaves tensors that no rank needs all of; a box of the target shifted by one
    names its parameter.
    """
    assert elsewhere.submit(loaded_as_recorded, family, tied, parts).result() == []


def volumes_of(family: str, tied: bool, processes: int, parts: int) -> list[tuple[int, int, int, int]]:
    config = config_of(family, tied)
    checkpoint = checkpoint_of(config, torch.bfloat16)
    rollout = rollout_layout(config, checkpoint.tensors, torch.bfloat16, parts, range(max(processes, parts)))
    if processes % parts:
        sharding = Sharding(plain_mesh(processes, processes), {}, {})
    else:
        sharding = best_sharding(checkpoint, rollout, processes, processes, parts)
    training = training_layout(checkpoint.tensors, checkpoint.parts, checkpoint.parameters, sharding)
    plan = make_plan(training, rollout, 10_000)
    assert plan.peak_buffer <= 20_000
    return [(volumes.needed, volumes.held, volumes.minimum, volumes.received) for volumes in plan.volumes.values()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_received_is_the_minimum(elsewhere: ProcessPoolExecutor, family: str, processes: int) -> None:
    for parts in (1, 2, 4):
        found = elsewhere.submit(volumes_of, family, family.startswith("gemma"), processes, parts).result()
        assert all(received == minimum for _, _, minimum, received in found)
        if parts == 1:
            assert all(received == needed - held for needed, held, _, received in found)


def refused(family: str, change: dict[str, Any], extra: dict[str, Tensor], parts: int) -> str:
    config = config_of(family, False)
    for key, value in change.items():
        setattr(config, key, value)
    tensors = checkpoint_of(config, torch.bfloat16).tensors | extra
    for name in [name for name, tensor in extra.items() if not tensor.shape]:
        del tensors[name]
    try:
        rollout_layout(config, tensors, torch.bfloat16, parts, range(parts))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "extra", "parts", "said"),
    [
        ({}, {}, 3, "vLLM cannot divide this model among 3 ranks"),
        ({}, {"model.layers.1.self_attn.v_proj.weight": Tensor((), "bfloat16")}, 1, "model.layers.1.self_attn.qkv_proj.weight: 4096 of its"),
        ({"tie_word_embeddings": True}, {"lm_head.weight": Tensor((131, 64), "bfloat16")}, 1, "has no place for lm_head.weight"),
    ],
)
def test_what_vllm_cannot_take_is_named(elsewhere: ProcessPoolExecutor, change: dict[str, Any], extra: dict[str, Any], parts: int, said: str) -> None:
    """Mutation: leaving `_check_filled` out misses the layer without values."""
    assert said in elsewhere.submit(refused, "qwen3", change, extra, parts).result()


SHAPES = {"up": (12, 8), "down": (8, 12), "norm": (3,), "odd": (7, 4), "one": (1, 5)}


class Layers(nn.Module):
    """Parameters that carry the numbers of their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)
        self.norm, self.odd, self.one = (nn.Parameter(torch.empty(SHAPES[name])) for name in ("norm", "odd", "one"))
        for parameter in self.parameters():
            parameter.data = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)


def held_by_dtensors(mesh: tuple[tuple[tuple[int, ...], ...], ...], rows: dict[str, int], tensor_parallel: bool) -> list[Any]:
    """This rank's slices by name, as FSDP2 leaves them, with the layouts that the placements themselves spell out."""
    devices = device_mesh(torch.tensor(mesh), "cpu", ("copy", "shard", "tensor"))
    layers = Layers()
    if tensor_parallel:
        parallelize_module(layers, devices["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    data = devices["copy", "shard"] if devices.size(0) > 1 else devices["shard"]
    by_parameter = {parameter: name.removesuffix(".weight") for name, parameter in layers.named_parameters()}
    fully_shard(layers, mesh=data, shard_placement_fn=lambda parameter: Shard(rows.get(by_parameter[parameter], 0)))
    found = []
    for name, parameter in layers.named_parameters():
        spec = (parameter.placements, tuple(parameter.device_mesh.shape), parameter.device_mesh.get_coordinate())
        box = cut(tuple((0, size) for size in parameter.shape), cuts(*spec))
        found.append((name.removesuffix(".weight"), parameter.to_local().detach().flatten().tolist(), box))
    return [dist.get_rank(), found]


@pytest.mark.parametrize(
    ("mesh", "rows", "tensor_parallel"),
    [
        (plain_mesh(4, 4), {}, False),
        (contained_mesh(4, 4, 2), {"down": 1}, False),
        (contained_mesh(4, 2, 2), {"down": 1}, False),
        (plain_mesh(4, 2, 2), {}, True),
        (plain_mesh(4, 2, 2), {"down": 1}, True),
    ],
    ids=["uneven", "ordered", "copies", "tensor_parallel", "tensor_parallel_rows"],
)
def test_dtensors_hold_what_the_layout_says(mesh: tuple[tuple[tuple[int, ...], ...], ...], rows: dict[str, int], tensor_parallel: bool) -> None:
    """Four gloo ranks, shards of unequal size and of none, permuted ranks, copies, tensor parallel beneath FSDP along the same dimension.

    Mutation: dividing by FSDP before tensor parallelism in `Sharding.held` mistakes which rows of `up` a rank has.
    """
    tensors = {name: Tensor(shape, "float32") for name, shape in SHAPES.items()}
    sharding = Sharding(mesh, rows, {"up": 0, "down": 1} if tensor_parallel else {})
    layout = training_layout(tensors, {name: Part(name, tensor.whole) for name, tensor in tensors.items()}, tensors, sharding)
    for rank, found in ranks.run(held_by_dtensors, 4, mesh, rows, tensor_parallel):
        for name, values, placed in found:
            boxes = layout.boxes[rank].get(name, ())
            numbers = torch.arange(tensors[name].elements).reshape(tensors[name].shape)
            assert values == [n for box in boxes for n in numbers[tuple(slice(*bounds) for bounds in box)].flatten().tolist()]
            assert (placed,) == boxes if volume(placed) else not boxes

"""What travels, on real process groups: slices of real FSDP shards into the parameters that vLLM's own loaders would have filled."""

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_reshard_layout import config_of, elsewhere  # noqa: F401  a fixture
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM, PreTrainedConfig

from engine.reshard.build import best_sharding
from engine.reshard.checkpoint import checkpoint_of
from engine.reshard.held import boxes_of, held_slices
from engine.reshard.landing import Landings
from engine.reshard.layout import Layout, Sharding
from engine.reshard.ledger import Ledger
from engine.reshard.proof import Proof
from engine.reshard.recording import Wanted
from engine.reshard.rollout_layout import joint_layout, rank_models, record
from engine.reshard.synchronise import Arrivals, Loaded, Synchroniser, gathered
from engine.training.shards import device_mesh

BUCKET = 20_000
"""Bytes: several rounds even for these models, and slices that are divided."""
Asked = tuple[Wanted, dict[str, torch.Tensor]]


class Table:
    """A rollout engine's parameters without the engine. They hold -1 where nothing was ever written."""

    def __init__(self, wanted: Wanted, shapes: Mapping[str, torch.Tensor]) -> None:
        self.weight_version: int | None = None
        self.parameters = {name: torch.full_like(tensor, -1) for name, tensor in shapes.items()}
        self._landings = Landings(wanted)

    def receive(self, arrivals: Arrivals, proof: Proof) -> Loaded:
        self.weight_version = None
        self._landings.fill(self.parameters, arrivals, proof)
        self.weight_version = proof.version
        return Loaded()


def numbered(config: PreTrainedConfig, version: int) -> Any:
    """A model of random weights, the same in every process."""
    torch.manual_seed(version)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def checkpoint_tensors(config: PreTrainedConfig, version: int) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    model = numbered(config, version)
    return revert_weight_conversion(model, {name: parameter.detach() for name, parameter in model.named_parameters()})


def asked(family: str, tied: bool, parts: int, dtype: str) -> list[Asked]:
    """By rank: what vLLM wants, and its parameters as its own loaders fill them from whole tensors."""
    config, kind = config_of(family, tied), getattr(torch, dtype)
    tensors = checkpoint_of(config, kind).tensors
    wanted = [record(model, tensors) for model in rank_models(config, kind, parts, torch.device("meta"))]
    loaded = []
    for model in rank_models(config, kind, parts, torch.device("cpu")):
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            parameter.data.fill_(-1)
        model.load_weights((name, tensor.to(kind)) for name, tensor in checkpoint_tensors(config, 1).items())
        loaded.append({name: parameter.data.clone() for name, parameter in parameters.items()})
    return list(zip(wanted, loaded, strict=True))


def mesh_of(sharding: Sharding) -> DeviceMesh:
    order = torch.tensor(sharding.mesh).squeeze(-1)
    return device_mesh(order, "cpu", ("replicate", "shard")) if len(order) > 1 else device_mesh(order[0], "cpu", ("shard",))


def sharded(config: PreTrainedConfig, version: int, mesh: DeviceMesh, dimensions: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """The model's parameters, sharded by FSDP2 over the ranks of the mesh."""
    model = numbered(config, version)
    names = {parameter: name for name, parameter in model.named_parameters()}
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda parameter: Shard(dimensions.get(names[parameter], 0)))
    return dict(model.named_parameters())


def synchronised(family: str, tied: bool, dtype: str, parts: int, shards: int, engines: list[Asked]) -> tuple[list[str], Ledger]:
    """On one of N ranks: FSDP of the best order and placement to engines of `parts` ranks each. Names what is not as vLLM's loaders have it."""
    config, rank, count = config_of(family, tied), dist.get_rank(), dist.get_world_size()
    checkpoint = checkpoint_of(config, getattr(torch, dtype))
    wanted, loaded = engines[rank % parts]
    needs = joint_layout(checkpoint.tensors, gathered(wanted), config.model_type)
    sharding = best_sharding(checkpoint, needs, count, shards, parts)
    slices = held_slices(sharded(config, 1, mesh_of(sharding), sharding.shard_dimension), checkpoint)
    training = Layout(checkpoint.tensors, gathered(boxes_of(slices)))
    synchroniser = Synchroniser(training, needs, BUCKET, None, rank, torch.device("cpu"))
    table = Table(wanted, loaded)
    ledger = synchroniser.run(slices, table, 7)
    assert table.weight_version == 7
    # Padding is the engine's own: it was there before, and nothing is sent for it.
    padding = {name: tensor == 0 for name, tensor in loaded.items()}
    wrong = [
        name for name, tensor in table.parameters.items() if not torch.where(padding[name] & (tensor == -1), loaded[name], tensor).equal(loaded[name])
    ]
    return wrong, ledger


Case = tuple[str, int, int]
"""Type, ranks that share the model, ranks that share an engine."""


def all_synchronised(family: str, tied: bool, file: Path) -> list[tuple[Case, list[str], Ledger]]:
    cases: list[tuple[Case, list[Asked]]] = torch.load(file, weights_only=False)
    return [((dtype, shards, parts), *synchronised(family, tied, dtype, parts, shards, engines)) for (dtype, shards, parts), engines in cases]


@pytest.mark.parametrize(
    ("family", "tied", "count", "copies"),
    [
        ("qwen3", True, 1, (1,)),
        ("qwen3", True, 2, (1,)),
        ("qwen3", True, 4, (1,)),
        ("qwen3", False, 4, (1, 2)),
        ("qwen2", False, 4, (1,)),
        ("llama", False, 4, (1,)),
        ("gemma3_text", True, 4, (1,)),
        ("qwen3_moe", False, 4, (1,)),
    ],
)
def test_engines_get_what_their_own_loaders_would_have_loaded(
    elsewhere: ProcessPoolExecutor,  # noqa: F811
    family: str,
    tied: bool,
    count: int,
    copies: tuple[int, ...],
    tmp_path: Path,
) -> None:
    """To the last bit, with the bytes of the plan: what a rank needs and does not hold; at FSDP 1, 2, 4 and hybrid 2 x 2, TP 1, 2, 4.

    Mutations tried: `device_mesh` without groups of its own (sorted ranks); messages cast after the wire; `kept` left out; the offset of a part
    of a piece forgotten in `_place`.
    """
    wanted = {
        (dtype, parts): elsewhere.submit(asked, family, tied, parts, dtype)
        for dtype in ("float32", "bfloat16")
        for parts in (1, 2, 4)
        if parts <= count
    }
    cases = [((dtype, count // copy, parts), future.result()) for (dtype, parts), future in wanted.items() for copy in copies]
    torch.save(cases, tmp_path / "cases.pt")  # Each tensor of an argument would take a file descriptor.
    for rank in ranks.run(all_synchronised, count, family, tied, tmp_path / "cases.pt"):
        for case, wrong, ledger in rank:
            assert wrong == [], case
            assert ledger.bytes_received == ledger.bytes_minimum, case
            assert ledger.peak_extra_bytes <= 2 * BUCKET + 1000, case  # up to 8 bytes of alignment for each message


def between_processes(file: Path) -> tuple[list[str], Ledger]:
    """Ranks 0 and 1 train, ranks 2 and 3 are an engine of two ranks."""
    engines: list[Asked] = torch.load(file, weights_only=False)
    config, rank = config_of("qwen3", False), dist.get_rank()
    checkpoint = checkpoint_of(config, torch.bfloat16)
    wanted, loaded = engines[rank % 2] if rank >= 2 else (None, {})
    needs = joint_layout(checkpoint.tensors, gathered(wanted), config.model_type)
    trainers = dist.new_group([0, 1])  # a collective of all
    slices = held_slices(sharded(config, 1, DeviceMesh.from_group(trainers, "cpu"), {}), checkpoint) if rank < 2 else {}
    training = Layout(checkpoint.tensors, gathered(boxes_of(slices) if rank < 2 else None))
    table = Table(wanted, loaded) if wanted else None
    ledger = Synchroniser(training, needs, BUCKET, None, rank, torch.device("cpu")).run(slices, table, 3)
    if table is None:
        return [], ledger
    return [name for name, tensor in table.parameters.items() if not torch.where(tensor == -1, loaded[name], tensor).equal(loaded[name])], ledger


def test_trainer_and_engines_may_be_other_processes(elsewhere: ProcessPoolExecutor, tmp_path: Path) -> None:  # noqa: F811
    """The plan of a split placement: who trains only sends, who generates only receives."""
    torch.save(elsewhere.submit(asked, "qwen3", False, 2, "bfloat16").result(), tmp_path / "engines.pt")
    found = ranks.run(between_processes, 4, tmp_path / "engines.pt")
    assert [wrong for wrong, _ in found] == [[]] * 4
    trainers, engines = [ledger for _, ledger in found[:2]], [ledger for _, ledger in found[2:]]
    assert all(ledger.bytes_received == 0 < ledger.bytes_sent for ledger in trainers)
    assert all(ledger.bytes_sent == 0 < ledger.bytes_received == ledger.bytes_minimum for ledger in engines)
    assert sum(ledger.bytes_sent for ledger in trainers) == sum(ledger.bytes_received for ledger in engines)

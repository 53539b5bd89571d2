"""Only what changed goes over the wire, and what arrives is what everything would have been: on real process groups, without an engine."""

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_reshard_layout import config_of
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from engine.reshard.checkpoint import checkpoint_of
from engine.reshard.held import Slices, boxes_of, held_slices
from engine.reshard.layout import Cut, Layout, Tensor, cut, volume
from engine.reshard.ledger import Ledger
from engine.reshard.plan import Message, Piece
from engine.reshard.proof import Proof, ProofError
from engine.reshard.synchronise import Arrivals, Loaded, Synchroniser, gathered
from engine.reshard.wire import BLOCK
from engine.training.shards import device_mesh

CPU = torch.device("cpu")
BUCKET = 4_000
"""Bytes: several rounds."""
RANKS = 4
HEADER = 8
TENSORS = {
    "embedding": Tensor((300, 24), "bfloat16"),
    "router": Tensor((9, 31), "float32"),  # Travels beside narrower ones.
    "up": Tensor((63, 49), "bfloat16"),
    "down": Tensor((37, 80), "bfloat16"),
    "codes": Tensor((520,), "int8"),
}


class Arrived:
    """A rollout engine that keeps what it is given, by slice."""

    def __init__(self) -> None:
        self.weight_version: int | None = None
        self.values: dict[Piece, torch.Tensor] = {}

    def receive(self, arrivals: Arrivals, proof: Proof) -> Loaded:
        self.weight_version = None
        self.values = {piece: values.clone() for piece, values in arrivals}
        for piece, values in self.values.items():
            proof.landed(piece, values)
        self.weight_version = proof.version
        return Loaded()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def inside(tensor: torch.Tensor, box: Any) -> torch.Tensor:
    return tensor[tuple(slice(*bounds) for bounds in box)]


class World:
    """Weights that every rank knows whole, so that it can tell what it must have got; rows are trained on all ranks, engines are pairs of ranks."""

    def __init__(self) -> None:
        self.rank, self._generator = dist.get_rank(), torch.Generator().manual_seed(0)
        self.weights = {name: self._random(tensor) for name, tensor in TENSORS.items()}
        training = Layout(TENSORS, {rank: {name: (self._rows(name, RANKS, rank),) for name in TENSORS} for rank in range(RANKS)})
        needs = Layout(TENSORS, {rank: {name: (self._rows(name, 2, rank % 2),) for name in TENSORS} for rank in range(RANKS)})
        self.changed = Synchroniser(training, needs, BUCKET, None, self.rank, CPU, changed_only=True)
        self.whole = Synchroniser(training, needs, BUCKET, None, self.rank, CPU)
        self.form: Any = self.changed.transfer._form
        self.engine = Arrived()

    @property
    def slices(self) -> Slices:
        return {name: [(box := self._rows(name, RANKS, self.rank), inside(tensor, box))] for name, tensor in self.weights.items()}

    def change(self, share: float) -> None:
        """Random bits, which are infinities and NaNs of all kinds too, for about so many of the elements."""
        for name, tensor in TENSORS.items():
            chosen = torch.rand(tensor.shape, generator=self._generator) < share
            self.weights[name] = torch.where(chosen, self._random(tensor), self.weights[name])

    def set(self, value: float) -> None:
        """Some elements of each tensor of real numbers."""
        for tensor in self.weights.values():
            if tensor.is_floating_point():
                tensor[::7] = value

    def synchronise(self, version: int) -> tuple[list[str], Ledger]:
        """Names what arrived otherwise than it is."""
        ledger = self.changed.run(self.slices, self.engine, version)
        return self.wrong(), ledger

    def wrong(self) -> list[str]:
        needed = {name: volume(self._rows(name, 2, self.rank % 2)) for name in TENSORS}
        for piece in self.engine.values:
            needed[piece.tensor] -= volume(piece.box)
        differ = [p.tensor for p, values in self.engine.values.items() if not bits(values).equal(bits(inside(self.weights[p.tensor], p.box)))]
        return differ + [name for name, missing in needed.items() if missing]

    def messages(self) -> list[Message]:
        """To this rank."""
        return [message for messages in self.changed.plan.rounds for message in messages if message.destination == self.rank]

    def headers(self) -> int:
        return HEADER * (RANKS - 1 + len(self.messages()))

    def _random(self, tensor: Tensor) -> torch.Tensor:
        dtype = getattr(torch, tensor.dtype)
        drawn = torch.randint(0, 256, (tensor.elements * dtype.itemsize,), dtype=torch.uint8, generator=self._generator)
        return drawn.view(dtype).view(tensor.shape)

    def _rows(self, name: str, parts: int, part: int) -> Any:
        return cut(TENSORS[name].whole, [Cut(0, parts, part)])


STEPS: list[tuple[str, float]] = [
    ("change", 0.0),  # the first synchronisation
    ("change", 0.0),
    ("change", 0.01),
    ("change", 0.2),
    ("change", 1.0),
    ("set", 0.0),
    ("set", -0.0),
    ("set", float("nan")),
    ("change", 0.003),
]


def all_versions() -> list[tuple[str, list[str], Ledger, Ledger, int]]:
    world, found = World(), []
    for version, (step, value) in enumerate(STEPS, 1):
        getattr(world, step)(value)
        wrong, ledger = world.synchronise(version)
        found.append((f"{step} {value}", wrong, ledger, world.whole.run(world.slices, Arrived(), version), world.headers()))
    return found


def test_versions_arrive_to_the_last_bit() -> None:
    """After several versions, with few, no and all elements changed; zero and minus zero, and NaNs of all kinds.

    Mutations tried: compare as numbers; copies not brought up to date after a whole message, or after what changed.
    """
    for rank in ranks.run(all_versions, RANKS):
        for case, wrong, ledger, whole, _ in rank:
            assert wrong == [], case
            assert (ledger.bytes_kept, whole.bytes_kept) == (whole.bytes_received + whole.bytes_sent, 0)
        received = {case: ledger.bytes_received for case, _, ledger, _, _ in rank[1:]}
        full, headers = rank[0][3].bytes_received, rank[0][4]
        assert full == rank[0][2].bytes_minimum > BUCKET
        # Mutation: headers not counted.
        assert rank[0][2].bytes_received == received["change 1.0"] == full + headers
        assert received["change 0.0"] == headers
        assert received["change 0.003"] - headers < full / 50
        # Three of four bytes in ten thousand words: position and value of each that changed, one count in 255.
        assert received["change 0.01"] - headers < full / 20
        assert all(ledger.bytes_received <= full + headers for _, _, ledger, _, _ in rank)
        assert all(ledger.peak_extra_bytes <= whole.peak_extra_bytes + BUCKET for _, _, ledger, whole, _ in rank)


def lost_copies() -> dict[str, Any]:
    world, found = World(), dict[str, Any]()
    for version in (1, 2):
        earlier = {message: copy.clone() for message, copy in world.form._copies.items()}
        world.change(0.01)
        world.synchronise(version)
    world.change(0.01)
    if world.rank == 1:
        world.changed.forget()
    found["forgotten"] = world.synchronise(3)
    world.change(0.01)
    if world.rank == 2:  # As if it had not been there since the first version.
        world.form._copies, world.form._version = earlier, 1
    found["behind"] = world.synchronise(4)
    world.change(0.01)
    found["healed"] = world.synchronise(5)
    if world.rank == 3:
        copy = world.form._copies[world.messages()[0]]
        copy[: copy.numel() // 2] ^= 1
    with pytest.raises(ProofError, match=r"rank 3: its rollout engine computes with other values of \w+\[.*\] than the trainer"):
        world.changed.run(world.slices, world.engine, 6)
    assert world.engine.weight_version is None
    found["after an error"] = world.synchronise(7)
    world.form.start()
    found["broken off"] = world.synchronise(8)
    found["bytes from"] = [sum(message.bytes for message in world.messages() if message.source == source) for source in range(RANKS)]
    found["headers"] = world.headers()
    return found


def test_copies_of_another_version_are_not_patched() -> None:
    """A rank that lost its copies, one that has those of an earlier version, and one whose copies are wrong.

    Mutations tried: any copies are good enough in `start`; `_version` kept while a synchronisation goes on; no `forget` after a proof that failed.
    """
    found = ranks.run(lost_copies, RANKS)
    for rank, results in enumerate(found):
        sizes = results["bytes from"]
        assert all(results[case][0] == [] for case in ("forgotten", "behind", "healed", "after an error", "broken off"))
        for case, other in (("forgotten", 1), ("behind", 2), ("healed", None), ("after an error", rank), ("broken off", rank)):
            # All that has to do with that rank travels whole, and little of the rest.
            least = sum(sizes) if rank == other else 0 if other is None else sizes[other]
            assert least <= results[case][1].bytes_received - results["headers"] <= least + (sum(sizes) - least) / 10, case


def trained(learning_rate: float) -> tuple[int, Ledger, float]:
    """One step of AdamW on two ranks, float32 weights, engines that compute in bfloat16: bytes that were to come, and the share that changed."""
    config, rank, count = config_of("qwen3", False), dist.get_rank(), dist.get_world_size()
    checkpoint = checkpoint_of(config, torch.bfloat16)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fully_shard(model, mesh=device_mesh(torch.arange(count), "cpu", ("shard",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)

    def slices() -> Slices:
        return held_slices(dict(model.named_parameters()), checkpoint)

    training = Layout(checkpoint.tensors, gathered(boxes_of(slices())))
    needs = Layout(checkpoint.tensors, {process: {name: (tensor.whole,) for name, tensor in checkpoint.tensors.items()} for process in range(count)})
    synchroniser, engine = Synchroniser(training, needs, BUCKET, None, rank, CPU, changed_only=True), Arrived()
    synchroniser.run(slices(), engine, 1)
    before, ids = engine.values, torch.randint(0, config.vocab_size, (4, 64))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    ledger = synchroniser.run(slices(), engine, 2)
    changed = expected = 0
    messages = [message for messages in synchroniser.plan.rounds for message in messages if message.destination == rank]
    for message in messages:
        found = sum(int((bits(before[p]).view(torch.int16) != bits(engine.values[p]).view(torch.int16)).sum()) for p in message.pieces)
        changed += found
        expected += min(message.bytes, 3 * found + -(-message.bytes // 2 // BLOCK)) if found else 0
    return expected + HEADER * (len(messages) + count - 1), ledger, 2 * changed / ledger.bytes_minimum


@pytest.mark.parametrize(("learning_rate", "least", "most"), [(1e-6, 1e-3, 0.05), (1e-3, 0.5, 1.0)])
def test_one_step_changes_few_elements_of_bfloat16(learning_rate: float, least: float, most: float) -> None:
    """Adam moves a weight w by the learning rate at first; neighbours in bfloat16 are |w| / 256 to |w| / 128 away. The proof is that all arrived."""
    for expected, ledger, share in ranks.run(trained, 2, learning_rate):
        assert least < share < most
        # Three bytes for each, one in 255 elements, and the headers. Mutation: positions of four bytes.
        assert ledger.bytes_received == expected

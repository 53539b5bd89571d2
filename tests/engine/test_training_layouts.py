"""Packed, balanced, sharded, in micro-batches: gradients and weights are those of plain transformers with the whole batch, in float64.

The reference is written down here once more, with nothing of the engine's. Ranks are processes of a gloo group, without Ray or vLLM.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run
from transformers import AutoConfig, AutoModelForCausalLM

from engine.batch import Batch
from engine.config import ArchitectureConfig, ModelConfig, OptimizerConfig, TrainingConfig
from engine.model import create
from engine.training.backend import TrainingBackend
from engine.training.balance import balanced_order
from engine.training.fsdp import FSDPBackend
from engine.training.micro_batches import micro_batches
from engine.training.registry import BACKENDS
from engine.training.shards import whole
from engine.training.tensor_parallel import TensorParallelBackend

ARCHITECTURE = ArchitectureConfig(
    hidden_size=64, layers=2, attention_heads=4, key_value_heads=2, head_dim=32, feed_forward_size=96, max_context_tokens=256
)
LENGTHS = [5, 19, 7, 40, 12, 9, 33, 6, 15, 11, 26, 8, 21, 5, 16, 10]
"""Sixteen rows of unequal lengths: two mini-batches for up to four ranks, which need different numbers of passes."""
MAX_TOKENS = 40
UPDATES = 2
TEMPERATURE = 0.7
# Adam divides by the gradient's size. With the usual epsilon a gradient that is twice too large would not show in the weights.
# Two of the four steps are clipped: scale shows in the others, and a norm of one rank's shard in these.
OPTIMIZERS = {
    head: OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-2, warmup_steps=2, max_gradient_norm=norm)
    for head, norm in {"policy": 28.0, "value": 2.0}.items()
}


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create(ModelConfig(architecture=ARCHITECTURE), 0, tmp_path_factory.mktemp("layouts") / "model")


def batch(seed: int) -> Batch:
    """Random tokens; responses of every length from none to nearly all; what a loss multiplies each token's log-prob or value by."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS).unsqueeze(1)
    position = torch.arange(max(LENGTHS))
    attention = position < lengths
    prompts = 1 + (torch.rand(len(LENGTHS), 1, generator=generator) * (lengths - 1)).long()
    prompts[2] = LENGTHS[2]  # A row without any response token.
    ids = torch.randint(7, 100, attention.shape, generator=generator) * attention
    response = attention & (position >= prompts)
    weights = torch.randn(response.shape, generator=generator, dtype=torch.float64) * response
    return Batch(tensors={"input_ids": ids, "attention_mask": attention, "response_mask": response, "weights": weights})


def loss(log_probs_or_values: torch.Tensor, rows: Batch) -> torch.Tensor:
    """Not yet divided by the tokens of the whole mini-batch. Curved, so that values that start at zero have a gradient as well."""
    return ((log_probs_or_values - rows.tensors["weights"]).square() * rows.tensors["response_mask"]).sum()


def order(parts: int, balanced: bool) -> list[int]:
    """Of rows; without balancing, rank p has the p-th part of each mini-batch as it came."""
    if balanced:
        return balanced_order(LENGTHS, parts, UPDATES)
    size = len(LENGTHS) // parts // UPDATES
    return [
        row for part in range(parts) for update in range(UPDATES) for row in range((update * parts + part) * size, (update * parts + part + 1) * size)
    ]


# What follows runs in the ranks.


def build(directory: Path, config: TrainingConfig, head: str, dtype: torch.dtype = torch.float64) -> tuple[TrainingBackend, int, int]:
    """The backend, this rank's part of the data, and the number of parts."""
    kind = BACKENDS.get(config.backend)
    mesh = kind.mesh(config, dist.get_world_size())
    return kind(directory, head, config, dtype, torch.device("cpu")), mesh.part[dist.get_rank()], mesh.parts  # type: ignore[arg-type]


def step(backend: TrainingBackend, config: TrainingConfig, head: str, rows: Batch) -> tuple[float, float]:
    """One optimizer step with this rank's rows: loss over all ranks, and gradient norm."""
    tokens = rows.tensors["response_mask"].sum()
    dist.all_reduce(tokens, group=backend.data_group)
    value = torch.zeros((), dtype=torch.float64)

    def term(part: Batch) -> torch.Tensor:
        found = backend.score(part, TEMPERATURE).log_probs if head == "policy" else backend.values(part)
        result = loss(found, part) / tokens
        value.add_(result.detach())
        return result

    cut = micro_batches(rows, MAX_TOKENS, padded=not config.pack_sequences, group=backend.data_group)
    done = backend.optimizer_step(cut, term)
    dist.all_reduce(value, group=backend.data_group)
    return value.item(), done.gradient_norm


def gradients(backend: Any) -> dict[str, torch.Tensor]:
    return {name: whole(parameter.grad).clone() for name, parameter in backend.parameters().items()}


def weights(backend: TrainingBackend, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.full_weights(dtype)}


def train(directory: Path, config: TrainingConfig, head: str, balanced: bool) -> dict[str, Any]:
    """Two rollout batches of two mini-batches each."""
    backend, part, parts = build(directory, config, head)
    backend.reset_optimizer(OPTIMIZERS[head], 4)
    seen: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for seed in range(2):
        rows = batch(seed).rows(torch.tensor(order(parts, balanced))).chunk(parts)[part]
        for mini_batch in rows.chunk(UPDATES):
            value, norm = step(backend, config, head, mini_batch)
            seen["losses"].append(value)
            seen["norms"].append(norm)
            seen["gradients"].append(gradients(backend))
    return seen | {"weights": weights(backend)}


# And what follows runs here.


def reference(directory: Path, head: str, clips: int | None = 2) -> dict[str, Any]:
    """The same on a whole model, each mini-batch in one padded pass with an attention mask."""
    optimizer = OPTIMIZERS[head]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    if head == "value":
        parameters |= {
            "value_head.weight": torch.nn.Parameter(torch.zeros(1, 64).double()),
            "value_head.bias": torch.nn.Parameter(torch.zeros(1).double()),
        }
    adam = torch.optim.AdamW(parameters.values(), betas=(0.9, 0.999), eps=optimizer.epsilon, weight_decay=optimizer.weight_decay)
    seen: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for seed in range(2):
        for number, rows in enumerate(batch(seed).chunk(UPDATES)):
            ids, attention, mask = (rows.tensors[name] for name in ("input_ids", "attention_mask", "response_mask"))
            if head == "policy":
                logits = model(input_ids=ids, attention_mask=attention.long()).logits[:, :-1] / TEMPERATURE
                found = F.pad(-F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none"), (1, 0))
            else:
                states = model.model(input_ids=ids, attention_mask=attention.long()).last_hidden_state[:, :-1]
                found = F.pad((states @ parameters["value_head.weight"].T + parameters["value_head.bias"]).squeeze(-1), (1, 0))
            value = loss(found * mask, rows) / mask.sum()
            adam.zero_grad()
            value.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters.values(), optimizer.max_gradient_norm)
            adam.param_groups[0]["lr"] = optimizer.learning_rate * min(1.0, (2 * seed + number + 1) / 2)
            adam.step()
            seen["losses"].append(value.item())
            seen["norms"].append(float(norm))
            seen["gradients"].append({name: copy.copy(parameter.grad) for name, parameter in parameters.items()})
    assert clips in (None, sum(norm > optimizer.max_gradient_norm for norm in seen["norms"]))
    return seen | {"weights": {name: parameter.detach() for name, parameter in parameters.items()}}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
    for mine, theirs in zip([*found["gradients"], found["weights"]], [*expected["gradients"], expected["weights"]], strict=True):
        assert set(mine) == set(theirs)
        for name, tensor in theirs.items():
            assert (mine[name] - tensor).abs().max() <= 1e-9 * tensor.abs().max(), name


PADDED = {"pack_sequences": False}
CASES = {
    "plain, 1 rank": (1, TrainingConfig(**PADDED), False),
    "packed, 1 rank": (1, TrainingConfig(), True),
    "padded, 2 ranks": (2, TrainingConfig(**PADDED), False),
    "packed, 2 ranks": (2, TrainingConfig(), False),
    "packed and balanced, 2 ranks": (2, TrainingConfig(), True),
    "packed and balanced, 4 ranks": (4, TrainingConfig(), True),
    "checkpointed, logits in parts, 2 ranks": (2, TrainingConfig(gradient_checkpointing=True, logits_rows_at_once=7), True),
    "gradients reduced after every pass, 2 ranks": (2, TrainingConfig(shard_gradients_every_pass=True), True),
    "gradients reduced after every pass, hybrid, 2 x 2": (4, TrainingConfig(shard_gradients_every_pass=True, shard_ranks=2), True),
    "hybrid, 2 x 2": (4, TrainingConfig(shard_ranks=2), True),
    "copies, 2 x 1": (2, TrainingConfig(shard_ranks=1), True),
    "gradients reduced after every pass, data x tensor parallel, 2 x 2": (
        4,
        TrainingConfig(backend="tensor_parallel", tensor_parallel_ranks=2, shard_gradients_every_pass=True),
        True,
    ),
    "tensor parallel, 2": (2, TrainingConfig(backend="tensor_parallel"), True),
    "data x tensor parallel, 2 x 2": (4, TrainingConfig(backend="tensor_parallel", tensor_parallel_ranks=2), True),
    "padded and checkpointed, tensor parallel, 2": (2, TrainingConfig(backend="tensor_parallel", gradient_checkpointing=True, **PADDED), False),
}


# Mutations: gradients not multiplied by the number of data ranks, or by all ranks in tensor parallelism; the gradient sync never turned on
# again after the first micro-batch; q_norm's gradient not summed over the tensor ranks; clipping by one shard's norm, or with copies counted
# twice; mini-batches dealt by rank; positions in the packed row that go on from sample to sample.
@pytest.mark.parametrize("case", CASES)
def test_policy(model_directory: Path, case: str) -> None:
    ranks, config, balanced = CASES[case]
    expected = reference(model_directory, "policy")
    for found in run(train, ranks, model_directory, config, "policy", balanced):
        assert_same(found, expected)


@pytest.mark.parametrize("case", ["packed and balanced, 4 ranks", "data x tensor parallel, 2 x 2", "padded, 2 ranks"])
def test_value(model_directory: Path, case: str) -> None:
    # Mutations: the value of the token's own state; a head that is shared out but not summed; a head that no optimizer sees.
    ranks, config, balanced = CASES[case]
    expected = reference(model_directory, "value")
    for found in run(train, ranks, model_directory, config, "value", balanced):
        assert_same(found, expected)


def shards_between_passes(directory: Path, config: TrainingConfig) -> tuple[int, int]:
    """Shards that have a gradient when the second pass of an optimizer step begins, and all shards."""
    backend, part, parts = build(directory, config, "policy")
    backend.reset_optimizer(OPTIMIZERS["policy"], 1)
    held: list[int] = []

    def term(rows: Batch) -> torch.Tensor:
        held.append(sum(parameter.grad is not None for parameter in backend.parameters().values()))
        return loss(backend.score(rows, TEMPERATURE).log_probs, rows)

    backend.optimizer_step(micro_batches(batch(0).chunk(parts)[part], MAX_TOKENS, padded=False, group=backend.data_group), term)
    return held[1], len(backend.parameters())


def test_gradients_reduced_after_every_pass_are_kept_as_shards(model_directory: Path) -> None:
    # Mutation: `set_requires_gradient_sync` without the setting; gradients are then those of whole parameters until the last pass.
    for every in (False, True):
        for shards, parameters in run(shards_between_passes, 2, model_directory, TrainingConfig(shard_gradients_every_pass=every)):
            assert shards == (parameters if every else 0)


def test_tensor_parallelism_of_biases(tmp_path: Path) -> None:
    # Mutation: a bias that every rank of the group adds to its part of a sum. Llama's have them everywhere, and it has no norms of heads.
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    biased = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape, vocab_size=100, attention_bias=True, mlp_bias=True))
    for name, parameter in biased.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    biased.save_pretrained(tmp_path)
    for found in run(train, 2, tmp_path, TrainingConfig(backend="tensor_parallel"), "policy", True):
        assert_same(found, reference(tmp_path, "policy", clips=None))


def ten_steps(directory: Path, config: TrainingConfig) -> list[float]:
    backend, part, parts = build(directory, config, "policy", torch.float32)
    backend.reset_optimizer(OPTIMIZERS["policy"], 10)
    rows = [batch(seed).with_tensors(weights=batch(seed).tensors["weights"].float()) for seed in range(10)]
    return [step(backend, config, "policy", each.chunk(parts)[part])[0] for each in rows]


def test_ten_steps_of_tensor_parallelism_are_ten_of_fsdp(model_directory: Path) -> None:
    # Mutation: replicated norms whose copies drift apart (their gradient summed on one rank only); it shows after the first step.
    fsdp = run(ten_steps, 2, model_directory, TrainingConfig())[0]
    tensor = run(ten_steps, 2, model_directory, TrainingConfig(backend="tensor_parallel"))[0]
    assert tensor == pytest.approx(fsdp, rel=1e-5)
    assert len(set(fsdp)) == 10


def keep_and_restore(directory: Path, config: TrainingConfig, head: str) -> None:
    """Assertions in the rank: the same steps after `load_state`, in a new backend too; the directory's weights after `load`."""
    backend, part, parts = build(directory, config, head)
    rows = batch(0).chunk(parts)[part]
    start = weights(backend)
    backend.reset_optimizer(OPTIMIZERS[head], 5)
    step(backend, config, head, rows)
    with torch.no_grad():  # Leaves the root's parameters whole; the state must be of the shards nevertheless.
        backend.score(rows, 1.0) if head == "policy" else backend.values(rows)
    state = copy.deepcopy(backend.state())
    step(backend, config, head, rows)
    moved, after = weights(backend), step(backend, config, head, rows)
    own = sum(tensor.numel() for tensor in state["parameters"].values())
    assert own < sum(tensor.numel() for tensor in start.values())  # Mutation: the whole model in every rank's state.
    fresh, _, _ = build(directory, config, head)
    for again in (backend, fresh):
        again.load_state(state)
        step(again, config, head, rows)
        assert all(torch.equal(tensor, moved[name]) for name, tensor in weights(again).items())
        assert step(again, config, head, rows) == after
    backend.load(directory)
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights(backend).items())


# Mutations: the optimizer's moments, its count of steps, or the schedule's left out of the state; moments of the wrong parameter; a reference
# instead of a copy; `load` that takes another rank's slice (data before tensor dimension), or keeps the value head.
@pytest.mark.parametrize("head", ["policy", "value"])
@pytest.mark.parametrize("case", ["packed, 2 ranks", "hybrid, 2 x 2", "data x tensor parallel, 2 x 2"])
def test_state_and_load(model_directory: Path, case: str, head: str) -> None:
    ranks, config, _ = CASES[case]
    run(keep_and_restore, ranks, model_directory, config, head)


def half_precision(directory: Path, config: TrainingConfig) -> Any:
    backend, part, parts = build(directory, config, "policy", torch.bfloat16)
    value, _, _ = build(directory, config, "value", torch.bfloat16)
    rows = batch(0).chunk(parts)[part]
    kept = {tensor.dtype for tensor in [*backend.state()["parameters"].values(), *value.state()["parameters"].values()]}
    values = value.values(rows)
    values.sum().backward()
    return kept, backend.score(rows, 1.0).log_probs.dtype, values.dtype, value.data_group is None


def test_half_precision_keeps_float32(model_directory: Path) -> None:
    # Mutations: parameters loaded in bfloat16 (small updates vanish); log-softmax or value head in bfloat16.
    for answer in run(half_precision, 2, model_directory, TrainingConfig()):
        assert answer == ({torch.float32}, torch.float32, torch.float32, True)


def a_wrong_first_position(directory: Path) -> None:
    backend, _, _ = build(directory, TrainingConfig(), "policy")
    rows = batch(0)
    rows.tensors["response_mask"][1, 0] = True
    with pytest.raises(ValueError, match="response_mask is True at position 0"):
        backend.score(rows, 1.0)
    with pytest.raises(RuntimeError, match="reset_optimizer"):
        backend.optimizer_step([], lambda part: torch.zeros(()))
    with pytest.raises(RuntimeError, match=r"training\.lora"):
        backend.without_adapter()
    assert backend.adapter_weights(torch.float32) == {}
    with pytest.raises(ValueError, match=r"training\.offload"):
        FSDPBackend(directory, "policy", TrainingConfig(offload=True), torch.float32, torch.device("cpu"))


def test_misuse(model_directory: Path) -> None:
    run(a_wrong_first_position, 1, model_directory)


def test_meshes() -> None:
    # Mutation: tensor ranks that are not neighbours; the data divided by copies instead of by ranks in hybrid sharding.
    assert FSDPBackend.mesh(TrainingConfig(shard_ranks=2), 4).part == (0, 1, 2, 3)
    tensor = TrainingConfig(backend="tensor_parallel", tensor_parallel_ranks=2)
    assert TensorParallelBackend.mesh(tensor, 4).part == (0, 0, 1, 1)
    assert TensorParallelBackend.mesh(TrainingConfig(backend="tensor_parallel"), 4).part == (0, 0, 0, 0)
    with pytest.raises(ValueError, match=r"training\.shard_ranks=3 does not divide the 4 ranks"):
        FSDPBackend.mesh(TrainingConfig(shard_ranks=3), 4)
    with pytest.raises(ValueError, match=r"training\.tensor_parallel_ranks=2 does not divide the 3 ranks"):
        TensorParallelBackend.mesh(tensor, 3)

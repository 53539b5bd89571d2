"""LoRA on sharded models: two ranks compute what one does, and merging, switching off and loading are those of a whole model, in float64.

Ranks are processes of a gloo group, without Ray or vLLM.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from transformers import AutoModelForCausalLM

from engine.batch import Batch
from engine.config import ArchitectureConfig, LoRAConfig, ModelConfig, OptimizerConfig, TrainingConfig
from engine.model import create
from engine.training.backend import TrainingBackend
from engine.training.fsdp import FSDPBackend

# Seven rows of A for two ranks: shards are uneven.
LORA = LoRAConfig(rank=7, alpha=10.5)
ARCHITECTURE = ArchitectureConfig(
    hidden_size=64, layers=2, attention_heads=2, key_value_heads=1, head_dim=32, feed_forward_size=96, max_context_tokens=256
)
# Clips always, so that a norm over other parameters than the trained ones, or of one rank alone, would show in the weights. A decay that
# reached the base would show too. With Adam's usual epsilon a gradient of twice the size would not.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-2, max_gradient_norm=0.05)
STEPS = 3
ROWS, LENGTH = 4, 12


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create(ModelConfig(architecture=ARCHITECTURE), 0, tmp_path_factory.mktemp("lora") / "model")


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, LENGTH + 1, (ROWS, 1), generator=generator)
    attention = torch.arange(LENGTH) < lengths
    response = attention & (torch.arange(LENGTH) >= 3)
    ids = torch.randint(7, 100, (ROWS, LENGTH), generator=generator) * attention
    weights = torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64) * response
    return Batch(tensors={"input_ids": ids, "attention_mask": attention, "response_mask": response, "weights": weights})


# What follows runs in the ranks.


def open_backend(directory: Path, config: TrainingConfig, head: str = "policy") -> FSDPBackend:
    return FSDPBackend(directory, head, config, torch.float64, torch.device("cpu"))  # type: ignore[arg-type]


def found(backend: TrainingBackend, head: str, rows: Batch) -> torch.Tensor:
    return backend.score(rows, 0.7).log_probs if head == "policy" else backend.values(rows)


def train(directory: Path, config: TrainingConfig, head: str) -> dict[str, Any]:
    """A few steps in micro-batches of one row; what the model then says, with and without its adapters, before and after loading anew."""
    backend = open_backend(directory, config, head)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    probe = batch(99)
    with torch.no_grad():
        seen: dict[str, Any] = {"start": found(backend, head, probe), "adapter start": backend.adapter_weights(torch.float64)}
    backend.reset_optimizer(OPTIMIZER, STEPS)
    seen["norms"] = []
    for seed in range(STEPS):
        rows = batch(seed)
        tokens = rows.tensors["response_mask"].sum()

        def loss(part: Batch, tokens: torch.Tensor = tokens) -> torch.Tensor:
            return (found(backend, head, part) - part.tensors["weights"]).square().mul(part.tensors["response_mask"]).sum() / tokens

        own = rows.chunk(ranks)[rank]
        seen["norms"].append(backend.optimizer_step(own.chunk(len(own)), loss).gradient_norm)
    with torch.no_grad():
        seen["on"] = found(backend, head, probe)
        with backend.without_adapter():
            seen["off"] = found(backend, head, probe)
        seen["on again"] = found(backend, head, probe)
    seen["adapter"] = backend.adapter_weights(torch.float64)
    seen["weights"] = {name: tensor.clone() for name, tensor in backend.full_weights(torch.float64)}
    seen["trained"] = sum(len(group["params"]) for group in backend._optimizer.param_groups)  # type: ignore[union-attr]
    other = open_backend(directory, config, head)
    other.load_state(backend.state())
    backend.load(directory)
    with torch.no_grad():
        seen["restored"], seen["loaded"] = found(other, head, probe), found(backend, head, probe)
    seen["adapter loaded"] = backend.adapter_weights(torch.float64)
    return seen


def half_precision(directory: Path) -> dict[str, Any]:
    """Kept in float32, computed in bfloat16."""
    backend = FSDPBackend(directory, "policy", TrainingConfig(lora=LORA), torch.bfloat16, torch.device("cpu"))
    rows = batch(0)
    with torch.no_grad():
        seen = {"start": backend.score(rows, 1.0).log_probs}
    backend.reset_optimizer(OPTIMIZER, STEPS)
    for _ in range(STEPS):
        backend.optimizer_step([rows], lambda part: (backend.score(part, 1.0).log_probs * part.tensors["weights"]).sum())
    with torch.no_grad(), backend.without_adapter():
        seen["off"] = backend.score(rows, 1.0).log_probs
    return seen | {"adapter": backend.adapter_weights(torch.float32), "weights": dict(backend.full_weights(torch.float32))}


def full_training(directory: Path) -> tuple[dict[str, torch.Tensor], str]:
    backend = open_backend(directory, TrainingConfig())
    try:
        backend.without_adapter()
    except RuntimeError as error:
        return backend.adapter_weights(torch.float64), str(error)
    return backend.adapter_weights(torch.float64), "no error"


# And what follows runs here.


def equal(left: Any, right: Any, tolerance: float) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def alone(model_directory: Path) -> dict[str, Any]:
    return run(train, 1, model_directory, TrainingConfig(lora=LORA), "policy")[0]


@pytest.mark.parametrize(
    ("ranks", "setting"),
    [(2, {}), (2, {"gradient_checkpointing": True}), (2, {"pack_sequences": False}), (4, {"shard_ranks": 2})],
    ids=["sharded", "checkpointing", "padded", "hybrid"],
)
def test_ranks_train_the_same_adapters(model_directory: Path, alone: dict[str, Any], ranks: int, setting: dict[str, Any]) -> None:
    # Mutation: adapters that start from each rank's own random state; weight decay or the gradient norm over frozen parameters.
    for seen in run(train, ranks, model_directory, TrainingConfig(lora=LORA, **setting), "policy"):
        equal(seen["norms"], alone["norms"], 1e-9)
        equal(seen["adapter"], alone["adapter"], 1e-9)
        equal(seen["weights"], alone["weights"], 1e-9)
        check(seen)


def test_one_rank(alone: dict[str, Any], model_directory: Path) -> None:
    check(alone)
    base = dict(AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float64).named_parameters())
    assert alone["weights"].keys() == base.keys()
    assert alone["trained"] == 2 * 7 * ARCHITECTURE.layers
    for name, tensor in alone["weights"].items():
        a, b = (alone["adapter"].get(f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight") for side in "AB")
        # Mutation: merge one rank's rows alone, or leave the scale out; let weight decay have the base.
        equal(tensor, base[name].detach() + (0 if a is None else 10.5 / 7 * b @ a), 1e-12)
        assert (a is not None) == ("layers" in name and "norm" not in name)


def check(seen: dict[str, Any]) -> None:
    """What holds whatever the layout."""
    # Mutation: `without_adapter` leaves a layer on; `load` keeps adapters as trained.
    assert not torch.allclose(seen["on"], seen["start"], atol=1e-3)
    for base in ("off", "loaded"):
        assert torch.equal(seen[base], seen["start"])
    for trained in ("on again", "restored"):
        assert torch.equal(seen[trained], seen["on"])
    for name, start in seen["adapter start"].items():
        assert torch.equal(seen["adapter loaded"][name], start)
        assert not torch.equal(seen["adapter"][name], start)


def test_a_merged_model_scores_as_the_adapted_one(model_directory: Path, alone: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float64)
    model.load_state_dict(alone["weights"], strict=False)
    rows = batch(99).tensors
    with torch.no_grad():
        logits = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"].long()).logits[:, :-1] / 0.7
    log_probs = logits.log_softmax(-1).gather(-1, rows["input_ids"][:, 1:, None]).squeeze(-1)
    mask = rows["response_mask"]
    equal(alone["on"][mask], log_probs[mask[:, 1:]], 1e-9)


def test_a_critic_trains_its_head_beside_the_adapters(model_directory: Path) -> None:
    # Mutation: add adapters after the head: it is then frozen at zero, and no gradient passes it.
    config = TrainingConfig(lora=LORA)
    whole = run(train, 1, model_directory, config, "value")[0]
    assert whole["trained"] == 2 * 7 * ARCHITECTURE.layers + 2
    assert whole["weights"]["value_head.weight"].ne(0).all()
    assert whole["start"].eq(0).all()
    assert whole["loaded"].eq(0).all()
    assert torch.equal(whole["restored"], whole["on"])
    for seen in run(train, 2, model_directory, config, "value"):
        equal(seen["norms"], whole["norms"], 1e-9)
        equal(seen["weights"], whole["weights"], 1e-9)


def test_mixed_precision_keeps_and_merges_in_float32(model_directory: Path) -> None:
    # Mutation: merge in the type that layers compute in.
    base = dict(AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).named_parameters())
    for seen in run(half_precision, 2, model_directory):
        assert torch.equal(seen["off"], seen["start"])
        a, b = (seen["adapter"][f"base_model.model.model.layers.1.mlp.up_proj.lora_{side}.weight"] for side in "AB")
        assert a.dtype == b.dtype == torch.float32
        assert b.ne(0).any()
        name = "model.layers.1.mlp.up_proj.weight"
        equal(seen["weights"][name], base[name].detach() + 1.5 * b @ a, 1e-6)


def test_full_training_has_no_adapter(model_directory: Path) -> None:
    assert run(full_training, 1, model_directory) == [({}, "the model has no adapter to do without; set training.lora")]


def test_tensor_parallelism_refuses_adapters() -> None:
    with pytest.raises(ValueError, match=r"lora: backend=tensor_parallel does not divide adapters; set backend=fsdp"):
        TrainingConfig(backend="tensor_parallel", lora=LORA)

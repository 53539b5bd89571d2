"""Low-rank adapters on a plain model: the library's own numbers, merging, switching off, and a checkpoint that the library loads."""

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from engine.config import LoRAConfig
from engine.training.lora import adapter_weights, adapters_off, add_adapters, base_name, export_adapter, is_adapter, merged_weights

LORA = LoRAConfig(rank=4, alpha=6.0)
LAYERS = 2
ALL = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
IDS = torch.tensor([[5, 17, 130, 2, 9], [1, 1, 64, 3, 77]])


def base(tied: bool = False, bias: bool = False) -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=tied,
        attention_bias=bias,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.1)
        return model


def adapted(config: LoRAConfig = LORA, **kind: bool) -> PreTrainedModel:
    """With adapters that do something: as after some training."""
    model = base(**kind)
    add_adapters(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def same(tensor: Tensor) -> Tensor:
    return tensor


def test_all_linear_is_every_linear_layer_but_the_head() -> None:
    # Mutation: leave the head in, or take the attention alone.
    model = base()
    add_adapters(model, LORA)
    names = {name.partition(".lora_")[0] for name, _ in model.named_parameters() if is_adapter(name)}
    assert names == {f"model.layers.{layer}.{part}" for layer in range(LAYERS) for part in ALL}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if "layers.0.mlp.gate_proj.lora" in name}
    assert sorted(shapes.values()) == [(4, 32), (48, 4)]


def test_named_layers_alone() -> None:
    model = base()
    add_adapters(model, LoRAConfig(rank=2, target_modules=["v_proj", "q_proj"]))
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name, _ in model.named_parameters() if is_adapter(name)}
    assert names == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["q_proj", "query"], r"training\.lora\.target_modules: query is not a linear layer .* there are: down_proj, .*, v_proj; or all_linear"),
        (["embed_tokens"], "embed_tokens is not a linear layer"),
        (["lm_head"], "lm_head is not a linear layer"),  # tied, its adapter would be the embedding's too, which no format can say
        ([], "it is empty"),
    ],
)
def test_layers_that_do_not_exist_are_refused(wanted: list[str], message: str) -> None:
    # Mutation: leave it to peft, which takes a list of which a single name fits.
    model = base(tied=True)
    with pytest.raises(ValueError, match=message):
        add_adapters(model, LoRAConfig(target_modules=wanted))
    assert not [name for name, _ in model.named_parameters() if is_adapter(name)]


def test_adapters_start_as_nothing_and_the_same_everywhere() -> None:
    # Mutation: peft's own start, from the global random state, which differs from rank to rank.
    starts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        model = base()
        add_adapters(model, LORA)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(logits(model), logits(base()))
        starts.append(adapter_weights(model, same, torch.float64))
    for name, tensor in starts[0].items():
        assert torch.equal(tensor, starts[1][name])
        assert tensor.eq(0).all() == (".lora_B." in name)
    values = [tensor for name, tensor in starts[0].items() if ".lora_A." in name]
    assert not torch.equal(values[0], values[1])
    # Uniform within sqrt(6 / ((1 + 5) in)) = in^-1/2, the start of `nn.Linear`.
    assert 0.9 * 32**-0.5 < max(value.abs().max().item() for value in values if value.shape[1] == 32) <= 32**-0.5


def test_equals_peft_forward_and_backward() -> None:
    # Mutation: alpha in place of alpha / rank.
    ours = adapted()
    peft = get_peft_model(base(), LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM"))
    report = set_peft_model_state_dict(peft, adapter_weights(ours, same, torch.float64))
    assert not report.unexpected_keys
    torch.testing.assert_close(logits(ours), logits(peft), rtol=0, atol=0)
    assert not torch.allclose(logits(ours), logits(base()))
    gradients = []
    for model in (ours, peft):
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append({n.removeprefix("base_model.model."): p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_only_adapters_get_gradients(tied: bool) -> None:
    # Mutation: leave the base trainable.
    model = adapted(tied=tied)
    model(input_ids=IDS, labels=IDS).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == is_adapter(name), name
        assert (parameter.grad is not None and bool(parameter.grad.ne(0).any())) == is_adapter(name), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_merged_weights_are_an_ordinary_checkpoint_that_computes_the_same(tied: bool, bias: bool) -> None:
    # Mutation: leave out the scale, or merge a layer with its neighbour's adapter.
    model = adapted(tied=tied, bias=bias)
    plain = base(tied=tied, bias=bias)
    untouched = copy.deepcopy(dict(model.named_parameters()))
    merged = list(merged_weights(model, same, torch.float64))
    assert [name for name, _ in merged] == [name for name, _ in plain.named_parameters()]
    assert {base_name(name) for name, _ in model.named_parameters() if not is_adapter(name)} == {name for name, _ in merged}
    plain.load_state_dict(dict(merged), strict=not tied)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(logits(plain), logits(base(tied=tied, bias=bias)))
    # Mutation: add in place: every synchronisation would add the adapters once more.
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, untouched[name])


def test_the_sum_is_formed_before_it_is_cast() -> None:
    # Mutation: cast W first; small adapters then vanish in, or double, the rounding.
    model = adapted()
    exact = dict(merged_weights(model, same, torch.float64))
    for name, tensor in merged_weights(model, same, torch.bfloat16):
        assert torch.equal(tensor, exact[name].to(torch.bfloat16)), name


def test_every_parameter_is_made_whole() -> None:
    # Halves on the first dimension stand for shards. Mutation: forget `whole` for A, which has `rank` rows.
    model = adapted()
    expected, adapters = dict(merged_weights(model, same, torch.float64)), adapter_weights(model, same, torch.float64)
    for parameter in model.parameters():
        parameter.data = parameter.data[: (len(parameter) + 1) // 2]
    wholes = {tuple(tensor.shape): None for tensor in [*expected.values(), *adapters.values()]}

    def whole(shard: Tensor) -> Tensor:
        sizes = [shape for shape in wholes if shape[1:] == tuple(shard.shape[1:]) and (shape[0] + 1) // 2 == len(shard)]
        return shard.new_zeros(sizes[0])

    assert {name: tensor.shape for name, tensor in merged_weights(model, whole, torch.float64)} == {n: t.shape for n, t in expected.items()}
    assert {name: tensor.shape for name, tensor in adapter_weights(model, whole, torch.float64).items()} == {n: t.shape for n, t in adapters.items()}


def test_tied_embeddings_stay_tied_and_untouched() -> None:
    model = adapted(tied=True)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    merged = dict(merged_weights(model, same, torch.float64))
    assert "lm_head.weight" not in merged
    assert torch.equal(merged["model.embed_tokens.weight"], base(tied=True).get_input_embeddings().weight)


def test_switched_off_it_is_the_base_bit_by_bit() -> None:
    # Mutation: leave a layer on; or leave it off after an error.
    model = adapted()
    on, trainable = logits(model), [name for name, p in model.named_parameters() if p.requires_grad]
    with adapters_off(model):
        assert torch.equal(logits(model), logits(base()))
        assert [name for name, p in model.named_parameters() if p.requires_grad] == trainable
        with adapters_off(model):
            pass
        assert torch.equal(logits(model), logits(base()))
    assert torch.equal(logits(model), on)
    with pytest.raises(KeyError), adapters_off(model):
        raise KeyError
    assert torch.equal(logits(model), on)


def test_nothing_to_switch_off() -> None:
    # At once, not when the block is entered.
    with pytest.raises(RuntimeError, match=r"set training\.lora"):
        adapters_off(base())


@pytest.mark.parametrize("config", [LORA, LoRAConfig(rank=3, alpha=1.5, target_modules=["down_proj", "k_proj"])])
def test_the_export_loads_in_peft_and_computes_the_same(tmp_path: Path, config: LoRAConfig) -> None:
    # Mutation: keep peft's adapter name in the tensors' names: peft loads the file with a warning, and the adapters stay at their start.
    model = adapted(config)
    export_adapter(tmp_path / "adapter", adapter_weights(model, same, torch.float64), config, base_model="some/base")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["base_model_name_or_path"]) == (config.rank, config.alpha, "some/base")
    assert described["target_modules"] == sorted(described["target_modules"])
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", framework="pt") as file:
        assert "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight" in file.keys()  # noqa: SIM118 (not a mapping)


def test_adapter_weights_are_a_copy() -> None:
    # Mutation: `.cpu()`, which on a host with one rank is the live parameter; the next optimizer step would change what was given out.
    model = adapted()
    given = adapter_weights(model, same, torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(tensor.ne(0).any() for tensor in given.values())


def test_the_export_is_what_peft_itself_would_save(tmp_path: Path) -> None:
    model = adapted()
    export_adapter(tmp_path / "ours", adapter_weights(model, same, torch.float64), LORA)
    PeftModel.from_pretrained(base(), tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    with (
        safe_open(tmp_path / "ours" / "adapter_model.safetensors", "pt") as ours,
        safe_open(tmp_path / "theirs" / "adapter_model.safetensors", "pt") as theirs,
    ):
        assert set(ours.keys()) == set(theirs.keys())
        assert all(torch.equal(ours.get_tensor(name), theirs.get_tensor(name)) for name in ours.keys())  # noqa: SIM118

"""Passes without padding, and what comes after the decoder, against plain transformers. One process, no sharding."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.training import scoring
from engine.training.attention import check_packable, use_packed_attention
from engine.training.backend import Measure
from engine.training.packing import Packing
from engine.training.scoring import PolicyModel, ValueModel
from engine.training.tensor_parallel import check_divisible

VOCABULARY = 50
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LENGTHS = [5, 9, 1, 7, 12]
TEMPERATURE = 0.7


def causal(packed: bool, family: str = "qwen3", **settings: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **SMALL, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa")
        for parameter in model.parameters():  # Initial weights are so small that attention is nearly even.
            torch.nn.init.normal_(parameter, std=0.3)
    if packed:
        use_packed_attention(model)
    return model


def rows(lengths: list[int] = LENGTHS, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """input_ids, attention_mask, response_mask [B, T]. The row of one token has no response."""
    position = torch.arange(max(lengths))
    attention = position < torch.tensor(lengths).unsqueeze(1)
    ids = torch.randint(1, VOCABULARY, attention.shape, generator=torch.Generator().manual_seed(seed)) * attention
    return ids, attention, attention & (position >= 2)


def plain_log_probs(model: PreTrainedModel, ids: torch.Tensor, attention: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, attention_mask=attention.long()).logits[:, :-1] / TEMPERATURE
    return F.pad(-F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none"), (1, 0)) * response


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), extra=st.integers(1, 3))
def test_packing(lengths: list[int], extra: int) -> None:
    # Mutations: positions that go on over samples; starts of the padded rows; padding of the middle rows kept.
    attention = torch.arange(max(lengths) + extra) < torch.tensor(lengths).unsqueeze(1)
    packing = Packing.of(attention)
    kept = [max(1, length) for length in lengths]  # Mutation: drop rows without tokens; a rank without any would have nothing to run.
    values = torch.arange(attention.numel()).view(attention.shape)
    assert packing.pack(values).tolist() == [value for row, length in zip(values.tolist(), kept, strict=True) for value in row[:length]]
    assert packing.position.tolist() == [position for length in kept for position in range(length)]
    assert packing.lengths == kept
    assert packing.starts.tolist() == [sum(kept[:row]) for row in range(len(kept) + 1)]


# Mutations: no `packing` in the attention (samples see each other); positions from 0 to N; is_causal left out; scaling left out;
# log-probs divided by the temperature after the softmax; the state of the token itself instead of the one before.
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_log_probs_and_gradients_are_those_of_transformers(family: str, packed: bool) -> None:
    # Gemma 2 caps its logits. Its sliding windows and capped attention go without packing only.
    softcap = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": None, "sliding_window": 6} if family == "gemma2" else {}
    if family == "gemma2" and packed:
        softcap["layer_types"] = ["full_attention"] * 2
    settings = {**softcap, **({"query_pre_attn_scalar": 5} if family == "gemma2" else {})}
    batch = rows()
    plain = causal(False, family, **settings)
    expected = plain_log_probs(plain, *batch)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected * weights).sum().backward()
    model = PolicyModel(causal(packed, family, **settings), packed, rows_at_once=1000)
    (log_probs,) = model(*batch, TEMPERATURE)
    (log_probs * weights).sum().backward()
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-6)  # The norms compute in float32.
    for (name, mine), theirs in zip(model.causal.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5, msg=name)


MEASURES: list[Measure] = ["entropy", "entropy_temperature_1", "squared_probabilities"]


# Mutations: the entropy at temperature 1 from log_softmax / temperature, or from log_softmax as it is; p instead of p^2; measures in another
# order; `torch.special.entr`, whose gradient is NaN where a probability is 0 (the last row of weights below).
@pytest.mark.parametrize("rows_at_once", [4, 1000])
def test_measures_and_their_gradients_are_those_of_plain_autograd(rows_at_once: int) -> None:
    batch = rows()
    weights = torch.randn(3, *batch[2].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain, model = causal(False), PolicyModel(causal(True), True, rows_at_once)
    for network in (plain, model.causal):
        network.lm_head.weight.data[-1] = -1e4  # So that some probabilities are 0, others 1.
        network.lm_head.weight.data[-1, 0] = 1e4
    raw = plain(input_ids=batch[0], attention_mask=batch[1].long()).logits[:, :-1]
    warm = (raw / TEMPERATURE).log_softmax(-1)
    cold = raw.log_softmax(-1)
    expected = [-(warm.exp() * warm).sum(-1), -(cold.exp() * cold).sum(-1), warm.exp().square().sum(-1)]
    expected = [F.pad(column, (1, 0)) * batch[2] for column in expected]
    _, *found = model(*batch, TEMPERATURE, MEASURES)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    sum((column * weight).sum() for column, weight in zip(found, weights, strict=True)).backward()
    sum((column * weight).sum() for column, weight in zip(expected, weights, strict=True)).backward()
    for (name, mine), theirs in zip(model.causal.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert mine.grad.isfinite().all(), name
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5, msg=name)


@given(sample=st.integers(0, len(LENGTHS) - 1), seed=st.integers(1, 5))
@settings(max_examples=10)
def test_samples_do_not_see_each_other(sample: int, seed: int) -> None:
    # Mutation: attention over the whole row, causal: samples after the changed one hear of it.
    model = PolicyModel(causal(True), True, rows_at_once=1000)
    ids, attention, response = rows()
    with torch.no_grad():
        (before,) = model(ids, attention, response, 1.0)
        ids[sample] = rows(seed=seed)[0][sample]
        (after,) = model(ids, attention, response, 1.0)
    others = [row for row in range(len(LENGTHS)) if row != sample]
    assert torch.equal(before[others], after[others])
    if LENGTHS[sample] > 2:
        assert not torch.equal(before[sample], after[sample])


# Mutations: the last part left out; entropy of one part for all; chunks of the vocabulary's logits kept for the backward pass (memory, below).
@pytest.mark.parametrize("rows_at_once", [1, 4, 24, 1000])
def test_parts_of_the_logits_give_the_same(rows_at_once: int) -> None:
    batch = rows()
    results = []
    for at_once in (10_000, rows_at_once):
        model = PolicyModel(causal(True), True, at_once)
        log_probs, *measures = model(*batch, TEMPERATURE, MEASURES)
        (log_probs.square().sum() + measures[0].square().sum()).backward()
        results.append([log_probs, *measures, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_logits_of_all_tokens_never_exist() -> None:
    # Mutation: torch.cat of the hidden states' logits; no checkpoint (the parts are kept for the backward pass).
    model = PolicyModel(causal(True), True, rows_at_once=3)
    largest, kept = 0, 0

    def see(_: Any, __: Any, logits: torch.Tensor) -> None:
        nonlocal largest
        largest = max(largest, logits.shape[0])

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.shape[-1:] == (VOCABULARY,)
        return tensor

    model.causal.get_output_embeddings().register_forward_hook(see)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(*rows(), 1.0, ["entropy"])
    assert largest == 3
    assert kept == 0


def test_what_is_not_asked_for_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation: the entropy in every pass, as an update without a bonus has no use for it.
    made = 0

    def count(log_softmax: torch.Tensor, temperature: float) -> torch.Tensor:
        nonlocal made
        made += 1
        return log_softmax.sum(-1)

    monkeypatch.setattr(scoring, "_MEASURES", dict.fromkeys(MEASURES, count))
    ids, attention, response = rows()
    model = PolicyModel(causal(True), True, rows_at_once=3)
    model(ids, attention, response, 1.0)[0].sum().backward()
    assert made == 0
    model(ids, attention, response, 1.0, ["entropy"])
    assert made == -(-int(response.sum()) // 3)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_pass_without_response_tokens_reaches_every_parameter(packed: bool) -> None:
    # Mutation: return zeros: other ranks would wait for this one's part in the backward pass.
    for mask in (torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.bool)):
        ids, none = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.bool)
        policy = PolicyModel(causal(packed), packed, rows_at_once=3)
        log_probs, entropy = policy(ids, mask, none, 1.0, ["entropy"])
        (log_probs.sum() - entropy.sum()).backward()
        value = ValueModel(causal(packed), packed)
        value(ids, mask, none).sum().backward()
        for model in (policy, value):
            assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_values_are_of_the_state_before_each_token(packed: bool) -> None:
    # Mutations: the state of the token itself (the value would know the action); a head that starts at random; values outside the response.
    ids, attention, response = rows()
    model = ValueModel(causal(packed), packed)
    assert not model(ids, attention, response).any()
    with torch.no_grad():
        torch.nn.init.normal_(model.value_head.weight)
        model.value_head.bias.fill_(0.5)
        states = causal(False).base_model(input_ids=ids, attention_mask=attention.long()).last_hidden_state
        expected = F.pad((states @ model.value_head.weight[0] + 0.5)[:, :-1], (1, 0)) * response
        torch.testing.assert_close(model(ids, attention, response), expected, rtol=0, atol=1e-5)
    assert not any("lm_head" in name for name, _ in model.named_parameters())


def config(family: str = "qwen3", **settings: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **SMALL, **settings)


@pytest.mark.parametrize(
    "wrong",
    [config(use_sliding_window=True, sliding_window=8, max_window_layers=1), config("gemma2"), config("mistral", sliding_window=8)],
    ids=["some layers slide", "gemma2", "mistral"],
)
def test_attention_that_packing_cannot_honour_is_refused(wrong: PreTrainedConfig) -> None:
    # Mutation: look at the first layer only; look at layer_types only (Mistral has none).
    with pytest.raises(ValueError, match=r"set training\.pack_sequences=false"):
        check_packable(wrong)


def test_attention_refuses_what_only_the_layer_knows() -> None:
    # Mutation: ignore unknown keywords of a layer: its capped attention would silently go uncapped.
    capped = causal(True, "gemma2", layer_types=["full_attention"] * 2)
    with pytest.raises(ValueError, match=r"softcap; set training\.pack_sequences=false"):
        PolicyModel(capped, True, 8)(*rows(), 1.0)


def test_attention_in_code_of_its_own_is_refused() -> None:
    # Mutation: trust `set_attn_implementation`, which only warns: samples would see each other.
    bloom = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", hidden_size=32, n_layer=1, n_head=2, vocab_size=VOCABULARY))
    with pytest.raises(ValueError, match=r"model bloom has attention of its own.*training\.pack_sequences=false"):
        use_packed_attention(bloom)


def test_scaled_logits_are_refused() -> None:
    # Mutation: leave the check out: log-probs would be those of another temperature.
    granite = AutoModelForCausalLM.from_config(AutoConfig.for_model("granite", **SMALL, logits_scaling=8.0))
    with pytest.raises(ValueError, match="scales its logits by logits_scaling"):
        PolicyModel(granite, True, 8)


def test_models_that_do_not_divide_are_refused() -> None:
    check_divisible(PolicyModel(causal(True), True, 8), 2)
    with pytest.raises(ValueError, match=r"training\.tensor_parallel_ranks=4 does not divide the model's num_key_value_heads, 2"):
        check_divisible(PolicyModel(causal(True), True, 8), 4)
    fused = AutoModelForCausalLM.from_config(AutoConfig.for_model("phi3", **SMALL, pad_token_id=0))
    with pytest.raises(ValueError, match=r"layers of model phi3 \(.*qkv_proj.*training\.backend=fsdp"):
        check_divisible(PolicyModel(fused, False, 8), 2)

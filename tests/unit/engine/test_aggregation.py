"""Aggregation: golden values, and rule 1 of the numerics: the gradient does not know how the batch was cut.

Every loss x every aggregation that it accepts, in float64; a new loss or aggregation is taken in by its registry line.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from engine.algorithms import aggregation
from engine.algorithms.aggregation import Denominators, aggregate, count
from engine.algorithms.registry import LOSSES
from engine.algorithms.types import LossInputs
from engine.batch import Batch, concat
from engine.config import LossConfig, PPOLossConfig

VOCABULARY = 5
FEATURES = 4
CONSTANT_TOKENS = 7

L = torch.tensor([[1.0, 2, 3], [4, 0, 0]])
M = torch.tensor([[True, True, True], [True, False, False]])


@pytest.mark.parametrize(
    ("how", "constant", "value"),
    [
        ("token_mean", None, 2.5),  # (1 + 2 + 3 + 4) / 4
        ("sequence_mean_token_sum", None, 5.0),  # (6 + 4) / 2
        ("sequence_mean_token_mean", None, 3.0),  # (2 + 4) / 2
        ("sequence_sum_constant", 5, 1.0),  # 10 / (2 x 5)
    ],
)
@pytest.mark.parametrize("beside", [0.0, math.nan, math.inf])
def test_golden_values(how: str, constant: int | None, value: float, beside: float) -> None:
    # Mutation: `per_token * mask` for `where`: NaN beside a token. `terms.mean(-1)`: 2.67 for the mean of means.
    terms = torch.where(M, L, beside)
    assert aggregate(terms, M, count(M), how, constant).item() == pytest.approx(value)


def test_every_aggregation_has_a_golden_value_and_a_setting() -> None:
    annotation = PPOLossConfig.model_fields["aggregation"].annotation
    assert aggregation.names() == sorted(annotation.__args__)  # type: ignore[union-attr]
    assert aggregation.names() == sorted(["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "sequence_sum_constant"])


def test_denominators_count_tokens_and_non_empty_sequences() -> None:
    # Mutation: count rows instead of non-empty rows.
    mask = torch.tensor([[True, True, False], [False, False, False], [False, True, False]])
    assert count(mask) == Denominators(tokens=3, sequences=2)
    assert count(mask) + count(mask[:1]) == Denominators(tokens=5, sequences=3)


@pytest.mark.parametrize("how", aggregation.names())
def test_a_step_without_response_tokens_is_zero(how: str) -> None:
    # Mutation: drop `max(1, ...)`: 0 / 0.
    terms = torch.ones(2, 3, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    value = aggregate(terms, mask, count(mask), how, 5 if how == "sequence_sum_constant" else None)
    value.backward()
    assert value.item() == 0
    assert terms.grad is not None
    assert terms.grad.tolist() == [[0.0] * 3] * 2


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"'mean'. There are: sequence_mean_token_mean"):
        aggregate(L, M, count(M), "mean")
    with pytest.raises(ValueError, match="only with it"):
        aggregate(L, M, count(M), "token_mean", 5)
    with pytest.raises(ValueError, match="only with it"):
        aggregate(L, M, count(M), "sequence_sum_constant")


@functools.cache
def step_batch(rows: int = 11, tokens: int = 6) -> Batch:
    """A step of one mini-batch: uneven lengths, one response in two spans, ratios and advantages on both sides of every bound."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    mask[2] = torch.tensor([False, True, True, False, True, False])
    return Batch(
        tensors={
            "features": draw(rows, tokens, FEATURES),
            "targets": torch.randint(VOCABULARY, (rows, tokens), generator=generator),
            "noise": draw(rows, tokens),
            "advantages": 2 * draw(rows, tokens),
            "mask": mask,
            "rollout_noise": draw(rows, tokens),
            "selected": torch.rand(rows, tokens, generator=generator) < 0.3,
        }
    )


def with_empty_rows(batch: Batch, positions: Sequence[int]) -> Batch:
    """`batch` with rows without a single response token put in before these positions; what they hold is poison."""
    poison = batch.rows(slice(0, 1))
    poison = poison.with_tensors(
        mask=torch.zeros_like(poison.tensors["mask"]),
        noise=torch.full_like(poison.tensors["noise"], -math.inf),
        selected=torch.ones_like(poison.tensors["mask"]),
        advantages=torch.full_like(poison.tensors["advantages"], math.nan),
    )
    edges = [0, *sorted(positions), len(batch)]
    parts = [batch.rows(slice(start, end)) for start, end in itertools.pairwise(edges)]
    return concat([part for piece in parts for part in (piece, poison)][:-1])


def share(batch: Batch, weight: Tensor, name: str, how: str, denominators: Denominators) -> Tensor:
    """One micro-batch's forward pass, a linear model with a softmax over it, and its share of the loss."""
    columns = batch.tensors
    log_probs = torch.log_softmax(columns["features"] @ weight, dim=-1).gather(-1, columns["targets"][..., None])[..., 0]
    old = log_probs.detach() + columns["noise"]  # fixed: weights do not change within a mini-batch
    rollout = log_probs.detach() + columns["rollout_noise"]
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=old,
        rollout_log_probs=rollout,
        advantages=columns["advantages"],
        mask=columns["mask"],
        selected=columns["selected"],
    )
    config = of(name, how)
    terms = LOSSES.get(name)(inputs, config)
    return aggregate(terms.per_token, columns["mask"], denominators, how, config.aggregation_constant_tokens)


def of(name: str, how: str) -> LossConfig:
    constant = CONSTANT_TOKENS if how == "sequence_sum_constant" else None
    return TypeAdapter(LossConfig).validate_python({"name": name, "aggregation": how, "aggregation_constant_tokens": constant})


def accepted(name: str) -> list[str]:
    """Aggregations that a loss accepts."""
    kind = type(TypeAdapter(LossConfig).validate_python({"name": name}))
    return list(kind.model_fields["aggregation"].annotation.__args__)  # type: ignore[union-attr]


def gradient(cut: list[list[Batch]], name: str, how: str) -> tuple[float, Tensor]:
    """Loss and gradient of a mini-batch that is cut into [ranks][micro-batches]; ranks add their gradients."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(FEATURES, VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
    denominators = Denominators(0, 0)
    for rank in cut:
        for part in rank:
            denominators += count(part.tensors["mask"])
    value = 0.0
    for rank in cut:
        for part in rank:
            loss = share(part, weight, name, how, denominators)
            loss.backward()
            value += loss.item()
    assert weight.grad is not None
    return value, weight.grad


@functools.cache
def undivided(name: str, how: str) -> tuple[float, Tensor]:
    return gradient([[step_batch()]], name, how)


def by_size(batch: Batch, size: int) -> list[Batch]:
    return [batch.rows(slice(start, start + size)) for start in range(0, len(batch), size)]


EVERY = [(name, how) for name in LOSSES.names() for how in accepted(name)]


@pytest.mark.parametrize("name", LOSSES.names())
def test_a_loss_refuses_the_aggregations_that_it_does_not_accept(name: str) -> None:
    # Mutation: give gspo or gmpo the aggregations of token losses: long sequences then weigh more than the paper's.
    assert set(accepted(name)) == ({"sequence_mean_token_mean"} if name in ("gspo", "gmpo") else set(aggregation.names()))
    for how in set(aggregation.names()) - set(accepted(name)):
        with pytest.raises(ValidationError, match="Input should be 'sequence_mean_token_mean'"):
            of(name, how)


@pytest.mark.parametrize(("name", "how"), EVERY)
@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 1), (1, 2), (1, 4), (2, 2), (4, 1), (4, 100)])
def test_gradient_does_not_know_how_the_batch_was_cut(name: str, how: str, ranks: int, micro_batch: int) -> None:
    # Mutation: `count(mask)` of the micro-batch inside `aggregate`, or `mask.shape[0]` for the sequences.
    whole = undivided(name, how)
    cut = gradient([by_size(part, micro_batch) for part in step_batch().chunk(ranks)], name, how)
    assert whole[1].abs().max() > 1e-3
    assert cut[0] == pytest.approx(whole[0], rel=1e-12)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "how"), EVERY)
@settings(max_examples=6, deadline=None)
@given(edges=st.lists(st.integers(0, 11), max_size=5), empty=st.lists(st.integers(0, 11), max_size=3))
def test_gradient_with_ragged_cuts_and_empty_rows(name: str, how: str, edges: list[int], empty: list[int]) -> None:
    # Mutation: count every row as a sequence: the inserted rows then thin out the gradient.
    whole = undivided(name, how)
    batch = with_empty_rows(step_batch(), empty)
    bounds = [0, *sorted(edges), len(batch)]
    parts = [batch.rows(slice(start, end)) for start, end in itertools.pairwise(bounds)]
    cut = gradient([parts], name, how)
    assert cut[0] == pytest.approx(whole[0], rel=1e-12)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "how"), EVERY)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradient_with_a_rank_of_empty_rows_only(name: str, how: str, ranks: int) -> None:
    whole = undivided(name, how)
    empty = with_empty_rows(step_batch().rows(slice(0, 1)), [0]).rows(slice(0, 1))
    cut = gradient([*[[part] for part in step_batch().chunk(ranks)], [empty, empty]], name, how)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "how"), EVERY)
def test_observation_tokens_are_transparent(name: str, how: str) -> None:
    # Rule 5: columns without response tokens put in between, poisoned, leave value and gradient alone.
    batch = step_batch()
    tokens = batch.tensors["mask"].shape[1]
    kept = torch.arange(tokens) * 2 + 1
    filler = {"noise": -math.inf, "rollout_noise": -math.inf, "advantages": -math.inf, "selected": True}
    wide = {key: tensor.new_full((len(batch), 2 * tokens + 1, *tensor.shape[2:]), filler.get(key, 0)) for key, tensor in batch.tensors.items()}
    for key, tensor in batch.tensors.items():
        wide[key][:, kept] = tensor
    whole, spread = gradient([[batch]], name, how), gradient([[Batch(tensors=wide)]], name, how)
    assert spread[0] == pytest.approx(whole[0], rel=1e-12)
    torch.testing.assert_close(spread[1], whole[1], rtol=1e-12, atol=1e-14)

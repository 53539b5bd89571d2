"""What is wrong with the rollout's weights is named at the end of the synchronisation, and nothing is generated with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probe import (
    bound_the_proof,
    break_synchronisation,
    head_not_packed,
    layer_not_packed,
    mend_synchronisation,
    open_probed,
    rank_dies,
    row_stale,
    slices_lost,
    tensors_swapped,
    version_behind,
    weights_stale,
)
from toy import SFT, prompt

from engine.config import EngineConfig, SamplingConfig
from engine.control.deadline import WorkerError
from engine.reshard.proof import WORDS, Coverage, checksum, packed_differs
from engine.rollout.plan import SamplePlan
from engine.trainer.session import Session

PLAN = SamplePlan("questions", (0, 1), 2, SamplingConfig(), 8, 7, "test", 0)


def move(session: Session) -> None:
    """An update, so that old weights are other weights."""
    session.actor.begin_stage(SFT).get()
    session.actor.load_rows([([7, 8, 9, 10], [False, True, True, True])] * 2).get()
    session.actor.update_sft([0, 1]).get()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (tensors_swapped, r"computes with other values of model\.layers\.0\.mlp\.up_proj\.weight\[\d+:\d+, 0:\d+\] than the trainer, and 1 more"),
        (row_stale, r"computes with other values of model\.embed_tokens\.weight\[.*\] than the trainer(?!,)"),
        (weights_stale, r"computes with other values of model\.embed_tokens\.weight\[.*\] than the trainer, and \d+ more tensors"),
        (slices_lost, r"model\.norm\.weight\[0:\d+\] never arrived in its rollout engine"),
        (head_not_packed, r"computes with another lm_head\.weight than it loaded \(a column of it has other values\)"),
        (layer_not_packed, r"computes with another model\.layers\.1\.mlp\.down_proj\.weight than it loaded"),
        (version_behind, r"has weight version \d+, the trainer \d+"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_first_wrong_tensor_is_named(session: Session, fault: Callable[[Any], Any], said: str) -> None:
    """One of two ranks is wrong; both stop, none generates, and the next complete synchronisation mends it."""
    session.load_prompts("questions", [prompt("1+1"), prompt("2+2", 1)])
    session.actor.apply(break_synchronisation, 1, fault).get()
    try:
        move(session)
        with pytest.raises(WorkerError, match=rf"ProofError: rank 1: (its rollout engine )?{said}"):
            session.actor.synchronise().get()
    finally:
        session.actor.apply(mend_synchronisation).get()
    with pytest.raises(WorkerError, match="generate was called before synchronise"):
        session.actor.generate(PLAN).get()
    versions = [rank["version"] for rank in session.actor.synchronise().get()]
    samples = session.actor.generate(PLAN).get()
    assert set(samples.tensors["weight_version"].tolist()) == set(versions)


def test_a_rank_that_dies_in_the_middle_is_named(cluster: None, engine_config: EngineConfig, model_directory: Any, tmp_path: Any) -> None:
    config = engine_config.model_copy(update={"rollout": engine_config.rollout.model_copy(update={"backend": "transformers"})})
    with open_probed(config, model_directory, tmp_path) as session:
        session.actor.apply(break_synchronisation, 1, rank_dies).get()
        with pytest.raises(WorkerError, match="actor rank 1, synchronise: the worker's process is gone"):
            session.actor.synchronise().get()


def test_the_cost_is_in_the_ledger(session: Session) -> None:
    for rank in session.actor.synchronise().get():
        assert 0 < rank["proof_seconds"] < rank["seconds"]
        assert 0 < rank["bytes_proof"] < rank["bytes_received"]
        parts = sum(rank[f"{part}_seconds"] for part in ("transfer", "load", "pack", "proof"))
        assert parts <= rank["seconds"]
        assert min(rank["load_seconds"], rank["pack_seconds"]) > 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3 * WORDS), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**31), st.data())
def test_any_changed_bit_changes_the_checksum(size: int, dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    """Mutations tried: even weights (a changed top bit is lost); no Horner step (parts of 512 kB may trade places); without the length."""
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    before = checksum(tensor, dtype)
    assert checksum(tensor.clone(), dtype) == before
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 8 * tensor.element_size() - 1))
    bits = tensor.view(torch.int32 if dtype is torch.float32 else torch.int16)
    bits[place] ^= 1 << bit if bit < 8 * tensor.element_size() - 1 else torch.iinfo(bits.dtype).min
    assert checksum(tensor, dtype) != before


def test_the_checksum_sees_order_and_length() -> None:
    def of(tensor: torch.Tensor) -> int:
        return checksum(tensor, torch.float32)

    tensor = torch.randn(3, WORDS, 2)
    assert of(tensor[[1, 0, 2]]) != of(tensor)  # parts of exactly the period of its weights
    assert of(tensor[:, torch.randperm(WORDS)]) != of(tensor)
    assert of(torch.zeros(8)) != of(torch.zeros(9))
    # Wherever the elements lie, and in whatever type: a trainer's shard and an engine's parameter differ in both.
    for view in (tensor[0, 5:].T, tensor[0].view(512, -1)[:, 3:200], tensor[0, :1001]):
        assert of(view) == of(view.contiguous()) == of(view.double())


def test_in_turns_every_slice_is_compared() -> None:
    """Mutations: a start that does not move on; a share that is a chance, drawn anew each time."""
    coverage, names = Coverage(), [f"layer.{number}" for number in range(500)]
    assert all(map(coverage.covers, names))
    seen: list[int] = []
    for _ in range(8):
        coverage = coverage.following(1 / 8)
        seen += [number for number, name in enumerate(names) if coverage.covers(name)]
    assert sorted(seen) == list(range(500))


def synchronise_often(session: Session, times: int, compared: float) -> None:
    for _ in range(times):
        move(session)
        assert {rank["proof_coverage"] for rank in session.actor.synchronise().get()} == {compared}


def test_a_bounded_proof_finds_what_stays_wrong(session: Session) -> None:
    """What is wrong in every synchronisation is found within as many as it takes to look at everything once."""
    session.actor.apply(bound_the_proof, 1 / 8).get()
    session.actor.apply(break_synchronisation, 1, row_stale).get()
    try:
        with pytest.raises(WorkerError, match=r"ProofError: rank 1: .*model\.embed_tokens\.weight"):
            synchronise_often(session, 9, compared=1 / 8)
    finally:
        session.actor.apply(mend_synchronisation).get()
        session.actor.apply(bound_the_proof, None).get()
    assert {rank["proof_coverage"] for rank in session.actor.synchronise().get()} == {1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_matrix_that_is_another_is_seen(dtype: torch.dtype) -> None:
    """Mutations: comparing one of the two kinds of input only: a change by an optimizer step is seen by the columns of it, or by the sum alone."""
    weight = (torch.randn(48, 64, generator=torch.Generator().manual_seed(0)) * 0.05).to(dtype)
    assert packed_differs(lambda inputs: inputs @ weight.T, weight, 3) is None
    step = (weight.float() * (1 + 2**-7)).to(dtype)
    assert packed_differs(lambda inputs: inputs @ step.T, weight, 3) == "a column of it has other values"
    row = weight.clone()
    row[5, 10] += 0.05  # No column of those that are looked at.
    assert "its product is off by 0.0" in str(packed_differs(lambda inputs: inputs @ row.T, weight, 3))

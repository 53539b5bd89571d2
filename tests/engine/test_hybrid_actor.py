"""Two engines, one set of weights: what the rollout draws is what the trainer would have drawn, after every synchronisation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from probe import (
    break_synchronisation,
    cache_kept,
    cache_without_versions,
    forget_the_temperature,
    head_not_packed_nor_proved,
    heed_the_temperature_again,
    mend_synchronisation,
    places_swapped,
    send_changes_only,
)
from toy import CONVERSATIONS, SFT, prompt
from transformers import AutoModelForCausalLM

from engine.batch import Batch
from engine.config import OptimizerConfig, RLStageConfig, SamplingConfig, StageTrainingConfig
from engine.control.deadline import WorkerError
from engine.control.future import join
from engine.rollout.plan import SamplePlan
from engine.tokenizer import render_prompt
from engine.trainer.session import Session
from engine.trainer.sft import train_sft
from engine.trainer.sync import DisagreementError, train_rl

BOUND = 1e-4
"""nats. Both engines compute in float32, and agree to about 1e-6."""
MAX_TOKENS = 256
WARM = SamplingConfig(temperature=1.0)
COOL = SamplingConfig(temperature=0.7)


QUESTIONS = [prompt(f"{a}+{b}" + "+1" * (a % 3), 2 * a + b) for a in range(5) for b in range(2)]
"""Of different lengths, some of which the model has not seen."""
# Longer than a block of the key-value cache, which is what prefixes are cached by (128 tokens on a CPU).
LONG = [prompt("+".join("123456789" * 9))]


def plan(sampling: SamplingConfig | None, max_tokens: int = 16, repeat: int = 2, name: str = "questions") -> SamplePlan:
    """Some responses to every question; without sampling one greedy response."""
    positions = tuple(range(len(QUESTIONS if name == "questions" else LONG)))
    greedy, repeat = sampling is None, repeat if sampling else 1
    return SamplePlan(name, positions, repeat, sampling or SamplingConfig(), max_tokens, 7, "test", 0, greedy_first=greedy)


@pytest.fixture(autouse=True)
def _prompts(session: Session) -> None:
    session.load_prompts("questions", QUESTIONS)
    session.load_prompts("long", LONG)


def stage(optimizer: OptimizerConfig, temperature: float = 1.0) -> RLStageConfig:
    return RLStageConfig(
        kind="rl",
        steps=3,
        prompts_per_step=2,
        max_prompt_tokens=32,
        max_response_tokens=8,
        sampling=SamplingConfig(temperature=temperature),
        training=StageTrainingConfig(optimizer=optimizer, max_tokens_per_micro_batch=MAX_TOKENS),
    )


def move(session: Session) -> None:
    """A few large updates: the weights are others afterwards, and the rollout engine has the old ones."""
    session.actor.begin_stage(stage(OptimizerConfig(learning_rate=3e-2))).get()
    ids = torch.randint(7, 100, (6, 12), generator=torch.Generator().manual_seed(1))
    session.actor.load_rows([(row.tolist(), [False] + [True] * 11) for row in ids]).get()
    for _ in range(3):
        session.actor.update_sft(list(range(6))).get()


def difference(session: Session, plan: SamplePlan, temperature: float) -> float:
    """Largest |trainer - rollout| log-prob of what the rollout draws now."""
    session.actor.begin_stage(stage(OptimizerConfig(learning_rate=0.0), temperature)).get()
    rollout = session.actor.generate(plan)
    agreement = session.actor.agreement(join(rollout, session.actor.log_prob(rollout))).get().result()
    return agreement["policy/max_log_prob_difference"]


@contextmanager
def broken(session: Session, fault: Callable[[Any], Any]) -> Iterator[None]:
    """A fault in every rank's synchronisations."""
    for rank in range(2):
        session.actor.apply(break_synchronisation, rank, fault).get()
    try:
        yield
    finally:
        session.actor.apply(mend_synchronisation).get()


def drawn(rollout: Batch) -> list[list[int]]:
    """Response tokens by row."""
    return [row[mask].tolist() for row, mask in zip(rollout.tensors["input_ids"], rollout.tensors["response_mask"], strict=True)]


@pytest.mark.parametrize("sampling", [WARM, COOL], ids=["temperature 1", "temperature 0.7"])
def test_agreement_after_updates(session: Session, sampling: SamplingConfig) -> None:
    before = drawn(session.actor.generate(plan(sampling)).get())
    move(session)
    session.actor.synchronise().get()
    assert difference(session, plan(sampling), sampling.temperature) <= BOUND
    # Else nothing moved, and old weights would do.
    assert drawn(session.actor.generate(plan(sampling)).get()) != before


@pytest.mark.parametrize("kept", [False, True])
def test_old_prefixes_are_not_used(session: Session, kept: bool) -> None:
    # Blocks are found by the version of their weights as well: even a cache that was not emptied has nothing to say.
    with broken(session, cache_kept) if kept else nullcontext():
        session.actor.generate(plan(WARM, name="long")).get()
        move(session)
        session.actor.synchronise().get()
        assert difference(session, plan(WARM, name="long"), 1.0) <= BOUND


def stale_head(session: Session) -> float:
    with broken(session, head_not_packed_nor_proved):
        move(session)
        session.actor.synchronise().get()
        return difference(session, plan(WARM), 1.0)


def swapped_places(session: Session) -> float:
    """What checksums cannot see: a tensor that is loaded under another's name, on both ranks and for good."""
    with broken(session, places_swapped):
        session.actor.synchronise().get()
        return difference(session, plan(WARM), 1.0)


def stale_prefixes(session: Session) -> float:
    with broken(session, cache_without_versions):
        session.actor.generate(plan(WARM, name="long")).get()
        move(session)
        session.actor.synchronise().get()
        return difference(session, plan(WARM, name="long"), 1.0)


def no_temperature(session: Session) -> float:
    session.actor.apply(forget_the_temperature).get()
    found = difference(session, plan(COOL), 0.7)
    session.actor.apply(heed_the_temperature_again).get()
    return found


def stale_weights(session: Session) -> float:
    """Old weights behind both engines' backs: the rollout's answers are scored after an update."""
    rollout = session.actor.generate(plan(WARM))
    rollout.get()
    move(session)
    return session.actor.agreement(join(rollout, session.actor.log_prob(rollout))).get().result()["policy/max_log_prob_difference"]


# Mutations, done in the workers: what the agreement is there to catch, it catches.
@pytest.mark.parametrize("fault", [stale_head, swapped_places, stale_prefixes, no_temperature, stale_weights])
def test_disagreement_is_seen(session: Session, fault: Callable[[Session], float]) -> None:
    assert fault(session) > 100 * BOUND


def test_rl_stops_on_a_stale_head(session: Session) -> None:
    config = stage(OptimizerConfig(learning_rate=1e-2))
    with broken(session, head_not_packed_nor_proved):
        move(session)
        session.actor.synchronise().get()
    events: list[Any] = []
    # Mutation: no comparison in `SyncTrainer._agreed`.
    with pytest.raises(DisagreementError, match=r"stage rl, step 1: trainer and rollout log-probs differ by .*max_log_prob_difference=0\.001"):
        train_rl(session, "rl", config, [prompt("1+1"), prompt("2+2", 1)], 0, events.append)
    # It stops before an update is made of such samples.
    assert [type(event).__name__ for event in events] == ["StageStarted"]


def test_generate_needs_the_trainers_weights(session: Session) -> None:
    move(session)
    # Mutation: leave `Phase.STALE` out of update_sft.
    with pytest.raises(WorkerError, match="generate was called before synchronise: the rollout engine does not have the trainer's weights"):
        session.actor.generate(plan(WARM)).get()
    session.actor.synchronise().get()
    assert len(session.actor.generate(plan(WARM)).get()) == 20


def test_versions_count_synchronisations(session: Session) -> None:
    first = session.actor.synchronise().get()
    second = session.actor.synchronise().get()
    assert [rank["version"] for rank in second] == [rank["version"] + 1 for rank in first]
    rollout = session.actor.generate(plan(WARM)).get()
    # Every sample carries the version of what drew it.
    assert set(rollout.tensors["weight_version"].tolist()) == {int(second[0]["version"])}


def test_bytes_received(session: Session, model_directory: Path) -> None:
    # Gathered in the rollout's type: a rank receives the half that it does not hold. Mutation: gather everything twice, as for a tied head.
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model_directory).parameters())
    for rank in session.actor.synchronise().get():
        assert rank["bytes_received"] == pytest.approx(parameters * 4 / 2, rel=1e-3)


def test_only_what_changed_may_travel(session: Session, tmp_path: Path) -> None:
    def received() -> list[float]:
        return [rank["bytes_received"] / rank["bytes_minimum"] for rank in session.actor.synchronise().get()]

    session.actor.apply(send_changes_only, True).get()
    try:
        # Everything and headers at first; headers alone where nothing changed.
        assert min(received()) > 1 > 0.01 > max(received())
        move(session)
        assert max(received()) > 0.01
        assert difference(session, plan(WARM), 1.0) <= BOUND
        assert max(received()) < 0.01
        session.actor.save_state(tmp_path).get()
        session.actor.load_state(tmp_path).get()
        # Mutation: leave `forget` out of take_own_state.
        assert min(received()) > 1
        assert difference(session, plan(WARM), 1.0) <= BOUND
    finally:
        session.actor.apply(send_changes_only, False).get()


def test_the_same_requests_give_the_same_responses(session: Session) -> None:
    one, two = (session.actor.generate(plan(WARM)).get() for _ in range(2))
    assert drawn(one) == drawn(two)
    assert torch.equal(one.tensors["rollout_log_probs"], two.tensors["rollout_log_probs"])
    # Mutation: one seed for all requests.
    assert len({tuple(tokens) for tokens in drawn(one)}) > 1


def test_neither_order_nor_ranks_change_a_response(session: Session) -> None:
    # Rows move from one rank to the other and into other company. Mutation: seed the engine instead of each request.
    asked = plan(WARM)
    order = torch.randperm(len(QUESTIONS), generator=torch.Generator().manual_seed(3)).tolist()
    straight = session.actor.generate(asked).get()
    shuffled = session.actor.generate(replace(asked, prompts=tuple(order))).get()
    rows = [2 * position + k for position in order for k in range(2)]
    assert drawn(shuffled) == [drawn(straight)[row] for row in rows]
    assert shuffled.objects["response"] == [straight.objects["response"][row] for row in rows]
    width = min(part.tensors["rollout_log_probs"].shape[1] for part in (straight, shuffled))
    torch.testing.assert_close(
        shuffled.tensors["rollout_log_probs"][:, :width], straight.tensors["rollout_log_probs"][rows][:, :width], atol=1e-5, rtol=0
    )
    # One request for two ranks: one of them has nothing to do.
    alone = session.actor.generate(replace(asked, first=len(asked) - 1)).get()
    assert drawn(alone) == drawn(straight)[-1:]


def test_greedy_tokens_are_those_of_transformers(session: Session, tmp_path: Path) -> None:
    # An engine of its own, through the exported files: a fault in the export, the reload or the kernels shows here.
    move(session)
    session.actor.synchronise().get()
    model = AutoModelForCausalLM.from_pretrained(session.export(tmp_path / "model"))
    expected = []
    for question in QUESTIONS:
        ids = torch.tensor([render_prompt(session.tokenizer, question.messages)])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        expected.append(answer[0, ids.shape[1] :].tolist())
    assert drawn(session.actor.generate(plan(None, max_tokens=12)).get()) == expected


def test_finished_and_truncated(session: Session) -> None:
    end = session.tokenizer.eos_token_id
    whole = session.actor.generate(plan(None, max_tokens=16)).get()
    assert bool(whole.tensors["finished"].all())
    assert all(tokens[-1] == end for tokens in drawn(whole))
    assert whole.tensors["response_tokens"].tolist() == [len(tokens) for tokens in drawn(whole)]
    assert set(whole.objects["response"]) <= {"\\boxed{1}", "\\boxed{2}"}
    # Mutation: `finished` when any reason is given.
    cut = session.actor.generate(plan(None, max_tokens=2)).get()
    assert not bool(cut.tensors["finished"].any())
    assert cut.tensors["response_tokens"].tolist() == [2] * len(cut)


def test_sft_ends_in_agreement(session: Session) -> None:
    # Mutation: `train_sft` without its last synchronise.
    train_sft(session, "again", SFT.model_copy(update={"steps": 2}), CONVERSATIONS, seed=5, emit=lambda event: None)
    assert difference(session, plan(WARM), 1.0) <= BOUND

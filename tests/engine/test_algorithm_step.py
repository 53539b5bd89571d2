"""What stands around the loss, on real engines: controllers and their state, the reference's reset, corrections, gradients that are not finite."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from probe import coefficients, disagree, find_the_loss_again, lose_the_loss, open_probed, remember, restore, weights
from toy import CONVERSATIONS, SFT, prompt

from engine.algorithms.coefficients import Coefficients
from engine.batch import Batch, concat
from engine.config import (
    AdaptiveEntropyConfig,
    AdaptiveKLConfig,
    AlgorithmConfig,
    EngineConfig,
    EntropyConfig,
    ImportanceWeightsConfig,
    KLConfig,
    OffPolicyConfig,
    OptimalTokenBaselineAdvantageConfig,
    OptimizerConfig,
    RejectionConfig,
    ReMaxAdvantageConfig,
    RewardConfig,
    RLStageConfig,
    SamplingConfig,
    StageTrainingConfig,
)
from engine.events import StepFinished, UpdatesSkipped
from engine.rollout.plan import SamplePlan
from engine.trainer.replay import kept_operations, replay, step_directory
from engine.trainer.session import Session
from engine.trainer.sft import train_sft
from engine.trainer.skips import NonFiniteGradientError
from engine.trainer.sync import train_rl

PROMPTS = [prompt(f"{a}+{b}", index=3 * a + b, answer=str(1 + (a + b) % 2)) for a in range(3) for b in range(3)]


def stage(algorithm: AlgorithmConfig, learning_rate: float = 3e-3, **changes: Any) -> RLStageConfig:
    values: dict[str, Any] = {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4, "updates_per_step": 2, **changes}
    return RLStageConfig(
        kind="rl",
        max_prompt_tokens=32,
        max_response_tokens=8,
        algorithm=algorithm,
        reward=RewardConfig(default="exact_match"),
        training=StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=learning_rate, max_consecutive_skips=3), max_tokens_per_micro_batch=64),
        **values,
    )


def run(session: Session, config: RLStageConfig, name: str = "rl") -> list[dict[str, float]]:
    """Metrics by step, from the same weights whatever ran before."""
    session.actor.apply(restore).get()
    session.actor.synchronise().get()
    events: list[Any] = []
    train_rl(session, name, config, PROMPTS, 0, events.append)
    return [dict(event.metrics) for event in events if isinstance(event, StepFinished)]


def kept_result(session: Session, name: str, operator: str) -> Batch:
    """What an operator of a stage's first step gave, all ranks together."""
    [operation] = [one for one in kept_operations(step_directory(session.directory, name, 1)) if str(one) == operator]
    return concat([pickle.loads(file.read_bytes()).result for file in operation.files])


@pytest.fixture(scope="module")
def referenced(_taught: Session, engine_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A session with a reference, from the taught weights on."""
    _taught.actor.apply(restore).get()
    start = _taught.export(tmp_path_factory.mktemp("start") / "model")
    with open_probed(engine_config.model_copy(update={"reference": True}), start, tmp_path_factory.mktemp("referenced")) as session:
        session.actor.apply(remember).get()
        yield session


def test_the_reference_is_reset(referenced: Session) -> None:
    kl = KLConfig(coefficient=0.1, reset_reference_every_steps=2, reset_optimizer=True)
    found = run(referenced, stage(AlgorithmConfig(kl=kl), steps=4))
    distances, rates = [step["policy/kl_from_reference"] for step in found], [step["policy/learning_rate"] for step in found]
    # Before the third step the reference becomes the policy that it is then. Mutations: a reset at the stage's start only; after every step;
    # the reference loaded from the first export.
    assert distances[0] < 1e-9
    assert distances[2] < 1e-9
    assert min(distances[1], distances[3]) > 1e-6
    assert rates == [3e-3] * 4
    without = run(referenced, stage(AlgorithmConfig(kl=KLConfig(coefficient=0.1)), steps=4))
    assert without[2]["policy/kl_from_reference"] > 1e-6


def test_controllers_over_two_steps_and_their_state(referenced: Session) -> None:
    kl = KLConfig(coefficient=0.1, adaptive=AdaptiveKLConfig(target=10.0, horizon=64))
    entropy = EntropyConfig(adaptive=AdaptiveEntropyConfig(target=5.0, step=0.01))
    config = stage(AlgorithmConfig(kl=kl, entropy=entropy), keep_calls_every_steps=1, sampling=SamplingConfig(temperature=0.8))
    first, second = run(referenced, config, "adaptive")
    # 16 samples of 64, far below the target: 1 - 0.2 / 4. Mutations: the controller sees one rank's samples (1 - 0.2 / 8); moves before the step.
    assert (first["policy/kl_coefficient"], second["policy/kl_coefficient"]) == pytest.approx((0.1, 0.095))
    assert (first["policy/entropy_coefficient"], second["policy/entropy_coefficient"]) == pytest.approx((0.0, 0.01))
    # Warmer logits are more even.
    assert first["policy/entropy_temperature_1"] > first["policy/entropy"] > 0
    third = Coefficients(kl=pytest.approx(0.09025), entropy=pytest.approx(0.02))
    assert referenced.actor.apply(coefficients).get() == [third] * referenced.actor.ranks
    # Mutation: leave them out of `take_memories`: a replayed update computes with others.
    directory = step_directory(referenced.directory, "adaptive", 2)
    [update] = [operation for operation in kept_operations(directory) if str(operation) == "actor.update"]
    assert {difference.column: difference.largest for difference in replay(referenced, directory, update) if difference.largest} == {}
    assert referenced.actor.apply(coefficients).get() == [third] * referenced.actor.ranks
    referenced.actor.load_state(directory / "state").get()
    assert referenced.actor.apply(coefficients).get() == [Coefficients(kl=pytest.approx(0.095), entropy=0.01)] * referenced.actor.ranks
    # Mutation: coefficients that outlive their stage.
    referenced.begin_stage(config)
    assert referenced.actor.apply(coefficients).get() == [Coefficients(kl=0.1, entropy=0.0)] * referenced.actor.ranks


def test_a_bonus_raises_the_entropy(session: Session) -> None:
    # Without rewards that differ it is all that the policy learns from. Mutation: the sign of the bonus.
    wrong = [prompt(f"{a}+{b}", index=3 * a + b, answer="9") for a in range(3) for b in range(3)]
    found: dict[float, list[float]] = {}
    for coefficient in (0.0, 0.5):
        bonus = EntropyConfig(coefficient=coefficient) if coefficient else None
        events: list[Any] = []
        session.actor.apply(restore).get()
        session.actor.synchronise().get()
        train_rl(session, "rl", stage(AlgorithmConfig(entropy=bonus), steps=3), wrong, 0, events.append)
        found[coefficient] = [event.metrics["policy/entropy"] for event in events if isinstance(event, StepFinished)]
    assert found[0.5][0] == found[0.0][0]
    assert found[0.5][2] > found[0.0][2] + 0.05


@pytest.fixture
def misreporting(session: Session) -> Iterator[Session]:
    """Of every fourth response, which is one of each prompt's four, the rollout says that it was less likely by a factor of e in each token."""
    bounded = session.config
    session.config = bounded.model_copy(update={"rollout": bounded.rollout.model_copy(update={"max_log_prob_difference": None})})
    session.actor.apply(disagree, 1.0, 4).get()
    yield session
    session.actor.apply(disagree, 0.0, 4).get()
    session.config = bounded


def test_a_planted_mismatch_is_rejected_or_weighed(misreporting: Session) -> None:
    after: dict[str, dict[str, torch.Tensor]] = {}
    metrics: dict[str, dict[str, float]] = {}
    for name, correction in {
        "nothing": None,
        "rejected": OffPolicyConfig(rejection=RejectionConfig(unit="sequence", level="geometric", low=0.6, high=1.4)),
        "rejected by group": OffPolicyConfig(rejection=RejectionConfig(unit="group", level="geometric", low=0.6, high=1.4)),
        "weighed": OffPolicyConfig(weights=ImportanceWeightsConfig(cap=2.0)),
    }.items():
        [metrics[name]] = run(misreporting, stage(AlgorithmConfig(off_policy=correction), steps=1))
        after[name] = weights(misreporting)
    assert metrics["nothing"]["policy/max_log_prob_difference"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["nothing"]["policy/off_policy_rejected_fraction"] == metrics["nothing"]["policy/off_policy_clipped_fraction"] == 0
    # A quarter of the samples, by tokens. Their ratio is e. Mutation: bounds as log-ratios (1 lies within 0.6 .. 1.4).
    share = metrics["rejected"]["policy/off_policy_rejected_fraction"]
    assert 0.15 < share < 0.4
    assert metrics["weighed"]["policy/off_policy_clipped_fraction"] == share
    # Every prompt has one of them. Mutation: the group by rows of a rank.
    assert metrics["rejected by group"]["policy/off_policy_rejected_fraction"] == 1.0
    # Mutations: statistics alone; an update that reads no weights.
    for name in ("rejected", "weighed"):
        assert not all(torch.equal(after["nothing"][key], tensor) for key, tensor in after[name].items()), name
    # Nobody learns from nothing. Mutation: an update that reads the response mask.
    assert metrics["rejected by group"]["policy/empty_updates"] == 2
    assert metrics["rejected by group"]["policy/loss"] == 0


def test_a_gradient_that_is_not_finite_is_kept_and_stops_the_run(session: Session) -> None:
    events: list[Any] = []
    start = weights(session)
    session.actor.apply(lose_the_loss, session.actor.ranks - 1).get()  # Rank 0's own gradient is sound, and it must skip as well.
    try:
        with pytest.raises(NonFiniteGradientError, match=r"stage nan, step 2: 4 optimizer steps of the policy in a row .*step_000002/policy"):
            train_rl(session, "nan", stage(AlgorithmConfig(), steps=3), PROMPTS, 0, events.append)
    finally:
        session.actor.apply(find_the_loss_again).get()
    assert all(torch.equal(start[name], tensor) for name, tensor in weights(session).items())
    skipped = [event for event in events if isinstance(event, UpdatesSkipped)]
    assert [(event.step, event.trained, event.updates) for event in skipped] == [(1, "policy", 2), (2, "policy", 2)]
    # Mutation: rank 0 alone writes: half of the batch is missing.
    kept = [torch.load(file) for file in sorted(Path(skipped[0].directory).iterdir())]
    assert sum(len(rows["advantages"]) for rows in kept) == 16
    assert {"input_ids", "response_mask", "old_log_probs", "rollout_log_probs", "advantages"} <= set(kept[0])
    [finished] = [event for event in events if isinstance(event, StepFinished)]
    assert (finished.metrics["policy/skipped_updates"], finished.metrics["policy/consecutive_skips"]) == (2, 2)


def test_supervised_training_stops_too(session: Session) -> None:
    events: list[Any] = []
    session.actor.apply(lose_the_loss, session.actor.ranks - 1).get()
    try:
        with pytest.raises(NonFiniteGradientError, match=r"stage sft_nan, step 3: 3 optimizer steps of the policy in a row"):
            train_sft(session, "sft_nan", SFT, CONVERSATIONS, 0, events.append)
    finally:
        session.actor.apply(find_the_loss_again).get()
    skipped = [event for event in events if isinstance(event, UpdatesSkipped)]
    assert [event.step for event in skipped] == [1, 2, 3]
    # Mutation: keep the rows of the first step again and again: each step takes its own.
    kept = [torch.load(Path(event.directory) / "rows.pt") for event in skipped]
    assert [len(rows) for rows in kept] == [SFT.rows_per_step] * 3
    assert kept[0] != kept[1]


def test_remax_compares_with_the_greedy_answer(session: Session) -> None:
    """What estimators are given, read from the calls that the run keeps."""
    config = stage(AlgorithmConfig(advantage=ReMaxAdvantageConfig(estimator="remax")), steps=1, keep_calls_every_steps=1)
    [metrics] = run(session, config, "remax")
    columns = kept_result(session, "remax", "actor.generate")
    rewards, advantages = kept_result(session, "remax", "reward.score"), kept_result(session, "remax", "actor.advantage")
    # One greedy answer a prompt, the same for all of its samples, and none of them is trained on or counted.
    answers = dict(zip(columns.tensors["prompt"].tolist(), columns.objects["greedy_response"], strict=True))
    assert len(answers) == 4
    assert [answers[place] for place in columns.tensors["prompt"].tolist()] == columns.objects["greedy_response"]
    assert len(columns) == len(advantages) == 16
    right = [float(answer == f"\\boxed{{{PROMPTS[place].ground_truth}}}") for place, answer in answers.items()]
    greedy = dict(zip(answers, right, strict=True))
    # Mutation: the reward of the first sample for that of the greedy answer.
    assert rewards.tensors["greedy_reward"].tolist() == [greedy[place] for place in columns.tensors["prompt"].tolist()]
    assert metrics["reward/mean"] == pytest.approx(rewards.tensors["reward"].mean().item())
    # The same answers come from an evaluation of these weights.
    plan = SamplePlan("remax", tuple(answers), 1, SamplingConfig(), 8, 0, "e", 0, greedy_first=True)
    session.actor.apply(restore).get()
    session.actor.synchronise().get()
    assert session.actor.generate(plan).get().objects["response"] == list(answers.values())
    # Rows of advantages are in another order: rewards of 0 and 1 minus 0 and 1.
    found = advantages.tensors["advantages"]
    expected = sorted((rewards.tensors["reward"] - rewards.tensors["greedy_reward"]).tolist())
    assert sorted(row[row.abs().argmax()].item() for row in found) == pytest.approx(expected)


def test_the_optimal_token_baseline_is_given_squared_probabilities(session: Session) -> None:
    config = stage(
        AlgorithmConfig(advantage=OptimalTokenBaselineAdvantageConfig(estimator="optimal_token_baseline")), steps=1, keep_calls_every_steps=1
    )
    run(session, config, "otb")
    columns = kept_result(session, "otb", "actor.log_prob").tensors
    chosen, squares = columns["old_log_probs"], columns["squared_probabilities"]
    there = columns["old_entropy"] > 0
    # sum_v p_v^2 lies between the chosen token's p^2 and 1, and is exp of minus an entropy that is below Shannon's.
    assert (squares[there] <= 1 + 1e-6).all()
    assert (squares[there] + 1e-6 >= (2 * chosen[there]).exp()).all()
    assert (-squares[there].log() <= columns["old_entropy"][there] + 1e-5).all()
    # The coin that the model tosses: two answers of about the same chance. Mutation: a column of ones.
    assert ((squares > 0.4) & (squares < 0.7)).any()

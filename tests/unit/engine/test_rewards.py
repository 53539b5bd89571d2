"""Rewards: where the answer is looked for, what counts as right, and that no fault becomes a 0."""

import contextlib
import pickle
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithms.reward_statistics import reward_statistics
from engine.algorithms.step import step_advantages
from engine.batch import Batch, join
from engine.config import AlgorithmConfig, EngineConfig, RewardConfig, RewardRunnerConfig
from engine.prompts import Prompt
from engine.rewards.answers import after_thinking, last_boxed
from engine.rewards.calling import Call
from engine.rewards.exact_match import exact_match
from engine.rewards.process import canaries
from engine.rewards.registry import REWARDS
from engine.rewards.runner import RewardError
from engine.rewards.scoring import Scored, Scoring
from engine.rewards.types import Function
from engine.workers.reward import RewardWorker

RIGHT_BOX = r"\boxed{5}"
RUNNER = RewardRunnerConfig(processes=1)


def prompt(number: int = 0, data_source: str = "sums", ground_truth: str = "5") -> Prompt:
    return Prompt(id=f"id{number}", index=number, messages=(), data_source=data_source, ground_truth=ground_truth)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{1} and \boxed{2}", "2"),  # Mutation: the first one.
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),  # Mutation: stop at the first closing brace.
        (r"{x} \boxed{\{1, 2\}} }", r"\{1, 2\}"),
        (r"\boxed{\{1}", r"\{1"),  # Mutation: count escaped braces: the box never closes.
        (r"\boxed{3} no, \boxed{5", "3"),  # cut off by the token limit
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{5", None),
        ("5", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@given(st.text(alphabet="\\boxed{} 5", max_size=60))
def test_last_boxed_finds_what_is_appended(noise: str) -> None:
    assert last_boxed(noise + " \\boxed{a{b}c}") == "a{b}c"


def test_after_thinking() -> None:
    assert after_thinking("a</think>b</think>c") == "c"  # Mutation: partition for rpartition.
    assert after_thinking("no thinking") == "no thinking"
    assert after_thinking("all thinking</think>") == ""


@pytest.mark.parametrize(
    ("response", "ground_truth", "value"),
    [
        (RIGHT_BOX, "5", 1.0),
        (r"so \boxed{ 5 } .", " 5", 1.0),
        (r"<think>\boxed{4}</think>\boxed{5}", "5", 1.0),
        (r"<think>\boxed{5}</think> I do not know", "5", 0.0),
        (r"\boxed{+5}", "5", 0.0),
        (r"\boxed{05}", "5", 0.0),
        (r"\boxed{5.0}", "5", 0.0),
        ("5", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_exact_match(response: str, ground_truth: str, value: float) -> None:
    assert exact_match(response, ground_truth) == value


@pytest.mark.parametrize(
    ("response", "ground_truth", "value"),
    [
        (RIGHT_BOX, "5", 1.0),
        (r"\boxed{+5}", "5", 1.0),
        (r"\boxed{3+2}", "5", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        (r"\boxed{[0, 1)}", "[0,1)", 1.0),
        (r"\boxed{5}", r"\boxed{5}", 1.0),
        ("The answer is 1/2.", "0.5", 1.0),
        (r"7 or 8? \boxed{5}, and then 9", "5", 1.0),
        (r"<think>\boxed{4}</think>\boxed{5}", "5", 1.0),
        (r"<think>\boxed{5}</think>I do not know", "5", 0.0),
        (r"\boxed{4}", "5", 0.0),
        (r"\boxed{5}\boxed{4}", "5", 0.0),  # a set of two: guessing several answers does not pay
        (r"\boxed{5", "5", 0.0),
        (r"\boxed{\frac{", "5", 0.0),
        ("no number", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_math_verify(response: str, ground_truth: str, value: float) -> None:
    assert REWARDS.get("math_verify")(response, ground_truth) == value


# Mutations: look for the box in the thinking too; take the last expression where a box is asked for; ask for `<think>`.
@pytest.mark.parametrize(
    ("response", "as_evaluated", "as_trained"),
    [
        (r"<think>5</think>\boxed{5}", 1.0, 1.0),
        (r"5</think>\boxed{+5}", 1.0, 1.0),  # templates that put <think> into the prompt
        (r"\boxed{5}", 1.0, 0.0),
        (r"<think>\boxed{5}", 1.0, 0.0),
        (r"<think>5</think>5", 1.0, 0.0),
        (r"<think>\boxed{5}</think>it is in the box", 0.0, 0.0),
        (r"<think></think>\boxed{4}\boxed{5}", 0.0, 1.0),  # the last box alone
        (r"<think></think>\boxed{4}", 0.0, 0.0),
    ],
)
def test_math_verify_that_asks_for_thinking_and_a_box(response: str, as_evaluated: float, as_trained: float) -> None:
    verify = REWARDS.get("math_verify")
    assert verify(response, "5") == as_evaluated
    assert verify(response, "5", require_think=True, require_box=True) == as_trained
    assert verify(response, "5", require_think=True) == (as_evaluated if "</think>" in response else 0.0)


def test_exact_match_that_asks_for_thinking() -> None:
    assert exact_match(r"<think>5</think>\boxed{5}", "5", require_think=True) == 1.0
    assert exact_match(r"\boxed{5}", "5", require_think=True) == 0.0


@pytest.fixture(scope="module")
def scoring() -> Iterator[Scoring]:
    """Strict by source, mathematical else; and functions that fail."""
    sources = {"strict": "exact_match", "faulty": "faulty_rewards:faulty"}
    with Scoring(RewardConfig(by_data_source=sources, runner=RUNNER)) as opened:
        yield opened


def scored(scoring: Scoring, response: str, *prompts: Prompt) -> list[Scored]:
    return [scoring.result(pending) for pending in [scoring.begin(asked, response, 1, True) for asked in prompts]]


def test_data_source_chooses_the_reward(scoring: Scoring) -> None:
    # Mutation: always the default.
    found = scored(scoring, r"\boxed{05}", prompt(0, "strict"), prompt(1, "loose"))
    assert [(sample.reward, sample.parts) for sample in found] == [(0.0, {"exact_match": 0.0}), (1.0, {"math_verify": 1.0})]


def test_a_failure_names_reward_and_prompt_and_is_no_score(scoring: Scoring) -> None:
    # Mutations: the failure as a part of the sum; the prompt left out of the reason.
    asked = ("nan", prompt(4, "faulty")), (RIGHT_BOX, prompt(3, "loose", "")), ("ab", prompt(5, "faulty"))
    bad, truth, good = (sample for response, of in asked for sample in scored(scoring, response, of))
    assert bad == Scored(0.0, "error", {}, "reward faulty_rewards:faulty gave nan; it must give a finite number for prompt id4 (row 4)")
    assert (truth.status, truth.reward, truth.parts) == ("error", 0.0, {})
    assert "reward math_verify raised ValueError: math_verify cannot read the ground truth ''" in truth.reason
    assert truth.reason.endswith("for prompt id3 (row 3)")
    assert (good.reward, good.status, good.reason) == (2.0, "ok", "")


def test_the_right_and_the_wrong_answer_are_known(scoring: Scoring) -> None:
    asked = scoring.begin_canaries()
    known = {canary.sample.response: canary.score for _, canary, _ in asked}
    # They finish a thinking: a recipe may ask for that.
    right, wrong = (r"2 + 3: \boxed{5}", r"a half: \boxed{\frac{1}{2}}"), (r"2 + 3: \boxed{6}", r"a third: \boxed{\frac{1}{3}}")
    assert known == {f"<think></think>{text}": float(text in right) for text in (*right, *wrong)}
    scoring.check(asked)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return 1.0", r"reward my_checker:right scored 1 where 0 is known to be right: response 'wrong', ground truth 'a'"),
        ("return float(response == 'wrong')", r"scored 0 where 1 is known to be right: response 'a'"),
        ("raise OSError('no disk')", r"raised OSError: no disk where 1 is known to be right"),
        ("return float(response == ground_truth)", None),
    ],
)
def test_a_reward_that_gets_a_known_answer_wrong_stops_the_run(body: str, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutations: leave `check` out of `use`; compare statuses alone.
    (tmp_path / "my_checker.py").write_text(
        "from engine.rewards.types import Canary, Sample\n"
        f"def right(response, ground_truth):\n    {body}\n"
        "CANARIES = {'right': [Canary(Sample('a', 'a'), 1.0), Canary(Sample('wrong', 'a'), 0.0)]}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    judge = worker()
    try:
        with contextlib.nullcontext() if text is None else pytest.raises(RewardError, match=text):
            judge.use(RewardConfig(default="my_checker:right", runner=RUNNER))
    finally:
        judge.close()


def worker() -> RewardWorker:
    return RewardWorker(config=EngineConfig(max_context_tokens=8), model_directory=Path(), device="cpu", dtype="float32", rank=0, ranks=1)


def scores(rewards: list[float], failed: Sequence[int] = (), **columns: list[float]) -> Batch:
    statuses = ["error" if row in failed else "ok" for row in range(len(rewards))]
    tensors = {name.replace("__", "/"): torch.tensor(values) for name, values in columns.items()}
    objects = {"reward_status": statuses, "reward_parts": [{}] * len(rewards), "reward_reason": [f"reason {row}" for row in range(len(rewards))]}
    return Batch({"reward": torch.tensor(rewards), "outcome": torch.tensor(rewards), **tensors}, objects)


def test_shuffle_deals_the_same_scores_out_anew() -> None:
    given = scores([1.0] * 10 + [0.0] * 30)

    def shuffled(*seed: int) -> list[float]:
        return worker().combine(given, {}, seed).tensors["reward"].tolist()

    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    first = shuffled(7, 1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # Mutation: np.random.shuffle.
    assert sum(first) == 10
    assert first != [1.0] * 10 + [0.0] * 30  # Mutation: return the scores as they are.
    assert first == shuffled(7, 1)
    assert first != shuffled(7, 2)


def test_annotators_scores_count_by_their_weight() -> None:
    given = scores([1.0, 0.0], judge__score=[4.0, -2.0], other__score=[9.0, 9.0])
    # 1 + 0.5 x 4 and 0 - 0.5 x 2; what has no weight counts nothing. Mutation: the weight left out.
    combined = worker().combine(given, {"judge": 0.5}, (1, 2)).tensors
    assert sorted(combined["reward"].tolist()) == [-1.0, 3.0]
    assert worker().combine(given, {"judge": 0.5}, None).tensors["reward"].tolist() == [3.0, -1.0]
    # Whether a group has signal is asked of what the functions gave. Mutation: of the sum, or dealt out.
    assert combined["outcome"].tolist() == [1.0, 0.0]


def failing(on_failure: str, fraction: float) -> RewardWorker:
    judge = worker()
    judge._reward = RewardConfig(on_failure=on_failure, max_failure_fraction=fraction)
    return judge


def test_a_sample_without_a_score_earns_0_whatever_annotators_say_of_it() -> None:
    # Mutation: add the annotator's score to a failure.
    given = scores([1.0, 0.0, 2.0, 3.0], failed=[1], judge__score=[4.0, 4.0, 0.0, 0.0])
    found = failing("zero", 0.25).combine(given, {"judge": 1.0}, None)
    assert found.tensors["reward"].tolist() == [5.0, 0.0, 2.0, 3.0]
    assert "kept" not in found.tensors
    assert found.objects["reward_status"] == ["ok", "error", "ok", "ok"]


def test_a_sample_without_a_score_is_excluded_where_that_is_configured() -> None:
    found = failing("exclude", 0.25).combine(scores([1.0, 0.0, 2.0, 3.0], failed=[1]), {}, None)
    assert found.tensors["kept"].tolist() == [True, False, True, True]
    # Shuffled, the nothing stays where it is. Mutation: permute all rows: some sample gets a 0 that nobody gave.
    for seed in range(20):
        dealt = failing("exclude", 0.25).combine(scores([1.0, 0.0, 2.0, 3.0], failed=[1]), {}, (seed,)).tensors["reward"].tolist()
        assert dealt[1] == 0.0
        assert sorted(dealt) == [0.0, 1.0, 2.0, 3.0]


def test_an_excluded_sample_leaves_the_statistics_of_its_group() -> None:
    # Mutation: leave kept out of the estimator's mask: the failure counts as a 0, and the others get +-0.577 and 1.155 in place of +-0.707.
    found = failing("exclude", 1.0).combine(scores([1.0, 0.0, 0.0], failed=[2]), {}, None)
    batch = join(Batch({"response_mask": torch.ones(3, 2, dtype=torch.bool), "prompt": torch.zeros(3, dtype=torch.int64)}), found)
    advantages = step_advantages(batch, AlgorithmConfig()).tensors["advantages"]
    assert advantages[:, 0].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0.0], abs=1e-5)


def test_too_many_failures_stop_the_run() -> None:
    # Mutation: `>=` for `>`: what is allowed is refused.
    failing("zero", 0.5).combine(scores([1.0] * 4, failed=[1, 2]), {}, None)
    with pytest.raises(RewardError, match=r"3 of 4 samples have no score, more than reward.max_failure_fraction allows; the first: reason 1"):
        failing("zero", 0.5).combine(scores([1.0] * 4, failed=[1, 2, 3]), {}, None)
    with pytest.raises(RewardError, match="1 of 4"):
        failing("zero", 0.0).combine(scores([1.0] * 4, failed=[3]), {}, None)


@pytest.fixture(scope="module")
def judge() -> Iterator[RewardWorker]:
    made = worker()
    made.use(RewardConfig(default="faulty_rewards:counted", max_failure_fraction=0.5, runner=RUNNER))
    made.load_prompts("set", [prompt(0), prompt(1)])
    yield made
    made.close()


def rollout(*rows: tuple[int, str], finished: Sequence[bool] = ()) -> Batch:
    tensors = {
        "prompt": torch.tensor([place for place, _ in rows]),
        "response_tokens": torch.tensor([len(response) for _, response in rows]),
        "finished": torch.tensor(finished or [True] * len(rows)),
    }
    return Batch(tensors, {"response": [response for _, response in rows]}, {"prompt_set": "set"})


def test_what_was_scored_ahead_is_not_scored_again(judge: RewardWorker) -> None:
    """`counted` scores how often its one process was called. Mutations: score everything again; keep what was scored ahead for a later step."""
    judge.score_ahead([("set", 0, "long", 4, True), ("set", 1, "longer", 6, True)])
    assert judge.score(rollout((1, "longer"), (0, "long"), (0, "new"))).tensors["reward"].tolist() == [2.0, 1.0, 3.0]
    assert judge.score(rollout((1, "longer"), (0, "long"))).tensors["reward"].tolist() == [4.0, 5.0]
    # What a function may be told of a sample makes it another one. Mutation: leave tokens or finished out of the key.
    assert judge.score(rollout((0, "a"), (0, "a"), finished=[True, False])).tensors["reward"].tolist() == [6.0, 7.0]


def test_scoring_ahead_does_not_wait(judge: RewardWorker) -> None:
    # Mutation: wait for each outcome: the thread that takes the messages scores one sample after the other.
    started = time.monotonic()
    judge.score_ahead([("set", 0, f"sleep 1.{number}", 9, True) for number in range(3)])
    assert time.monotonic() - started < 1.0
    judge.score(rollout((0, "a")))


def test_failures_of_a_step_are_seen_as_such(judge: RewardWorker) -> None:
    found = judge.score(rollout((0, "a"), (1, "raise boom"), (0, "b"), (1, "c")))
    assert found.objects["reward_status"] == ["ok", "error", "ok", "ok"]
    assert found.objects["reward_reason"][1] == "reward faulty_rewards:counted raised ValueError: boom for prompt id1 (row 1)"
    assert found.objects["reward_parts"][1] == {}
    metrics = reward_statistics(found).result()
    assert (metrics["reward/error_fraction"], metrics["reward/timeout_fraction"]) == (0.25, 0.0)
    # Mutation: count the failure as a 0 in the mean of the part.
    assert metrics["reward/counted_mean"] == pytest.approx(found.tensors["reward"].sum().item() / 3)
    with pytest.raises(RewardError, match=r"the first: reward faulty_rewards:counted raised ValueError: boom for prompt id1 \(row 1\)"):
        judge.score(rollout((1, "raise boom"), (1, "raise bang"), (0, "a")))


def test_greedy_answers_are_scored_and_a_failure_of_theirs_is_one_of_the_sample() -> None:
    # Mutations: the greedy answer's 0 as a baseline; its score added to what the parts are.
    judge = worker()
    judge.use(RewardConfig(default="faulty_rewards:faulty", max_failure_fraction=0.5, on_failure="exclude", runner=RUNNER))
    judge.load_prompts("set", [prompt(0), prompt(1)])
    given = rollout((0, "a"), (1, "bb"), (0, "ccc"), (1, "dddd"))
    greedy = Batch({"greedy_tokens": torch.ones(4, dtype=torch.int64), "greedy_finished": torch.ones(4, dtype=torch.bool)})
    try:
        found = judge.score(join(given, greedy, Batch(objects={"greedy_response": ["right", "raise boom"] * 2})))
        combined = judge.combine(found, {}, None)
    finally:
        judge.close()
    assert combined.tensors["reward"].tolist() == [1.0, 0.0, 3.0, 0.0]
    assert combined.tensors["greedy_reward"].tolist() == [5.0, 0.0, 5.0, 0.0]
    assert combined.tensors["kept"].tolist() == [True, False, True, False]
    assert combined.objects["reward_reason"][1].startswith("greedy answer: reward faulty_rewards:faulty raised ValueError: boom")


def test_the_processes_stay_when_the_next_stage_scores_alike(judge: RewardWorker) -> None:
    # Mutation: a new runner for every stage and evaluation, each of which loads everything anew.
    assert judge._scoring is not None
    before = judge._scoring
    judge.use(before.config.model_copy(update={"shuffle": True}))
    assert judge._scoring is before


def test_the_configuration_refuses_rewards_that_there_are_not() -> None:
    with pytest.raises(ValueError, match=r"by_data_source\.sums\n.*no reward is called 'exact_mach': did you mean exact_match"):
        RewardConfig(by_data_source={"sums": "exact_mach"})
    with pytest.raises(ValueError, match=r"default\.a\n.*function: no reward is called 'lenght': did you mean length"):
        RewardConfig(default={"a": {"function": "lenght"}})
    with pytest.raises(ValueError, match=r"default\.a\n.*function: has to be set: a name from `almanac list`"):
        RewardConfig(default={"a": {"weight": 1.0}})
    # Mutation: one class for all functions: a parameter of another one is taken and has no effect.
    with pytest.raises(ValueError, match=r"default\.a\.length\.pattern\n.*not permitted"):
        RewardConfig(default={"a": {"function": "length", "max_tokens": 5, "pattern": "a"}})


def test_a_name_alone_stands_for_a_sum_of_one() -> None:
    assert RewardConfig(default="exact_match") == RewardConfig(default={"exact_match": {"function": "exact_match"}})
    ((place, name, part),) = RewardConfig(default="my_rewards.polite:Polite").all_parts()
    assert (place, name, part.function, part.weight) == ("default", "polite", "my_rewards.polite:Polite", 1.0)
    # To the workers and back. Mutation: the short form kept in the configuration, which has no digest of its own then.
    config = RewardConfig(default={"a": {"function": "rules", "rules": [{"name": "b", "pattern": "c", "must": False}], "weight": 2.0}})
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.digest() != RewardConfig().digest()


def test_every_registered_reward_has_its_settings_and_the_other_way_round() -> None:
    # Mutation: a line in the registry without a class: `almanac list` names what no recipe can use.
    for name in REWARDS.names():
        more = {"regex": {"pattern": "a"}, "rules": {"rules": [{"name": "b", "pattern": "c"}]}, "length": {"max_tokens": 1}}
        more["overlong"] = {"max_tokens": 2, "buffer_tokens": 1}
        (part,) = RewardConfig(default={"part": {"function": name, **more.get(name, {})}}).default.values()
        # What the recipe can set is what the function takes. Mutation: a setting that no parameter is there for.
        Call.of(REWARDS.get(name), Function(name, part.given()))
        assert canaries(Function(name)), f"{name} has no known answers"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"function": "regex", "pattern": "(a"}, "is no regular expression: missing"),
        ({"function": "length"}, "set target_tokens, or min_tokens and max_tokens"),
        ({"function": "length", "target_tokens": 4, "max_tokens": 5}, "set target_tokens, or"),
        ({"function": "length", "min_tokens": 6, "max_tokens": 5}, "is above max_tokens"),
        ({"function": "overlong", "max_tokens": 5, "buffer_tokens": 6}, "every response is punished"),
        ({"function": "rules", "rules": []}, "at least 1 item"),
        ({"function": "rules", "rules": [{"name": "a", "pattern": "b"}] * 2}, "several are called a"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RewardConfig(default={"part": settings})

"""Rewards run in processes that may hang, crash and grow; against the real runner with real processes, and every fault that was thought of."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty_rewards import FOREVER

from engine.config import RewardRunnerConfig
from engine.rewards.calling import Call
from engine.rewards.registry import REWARDS
from engine.rewards.runner import RewardError, RewardRunner
from engine.rewards.types import Function, Outcome, Sample

LIMIT = 2.0
"""Seconds. What is allowed to pass beyond it is generous: other tests may have the cores."""
SLACK = 10.0
CONFIG = RewardRunnerConfig(processes=4, time_limit_seconds=LIMIT, memory_limit_megabytes=500.0)
FUNCTIONS = {
    "faulty": Function("faulty_rewards:faulty"),
    "awaited": Function("faulty_rewards:awaited", samples_at_once=8),
    "together": Function("faulty_rewards:together", samples_at_once=4),
    "math": Function("math_verify"),
}
TIMEOUT = Outcome("timeout", reason="did not answer within 2 s")


@pytest.fixture(scope="module")
def runner() -> Iterator[RewardRunner]:
    opened = RewardRunner(FUNCTIONS, CONFIG)
    yield opened
    opened.close()


def ask(runner: RewardRunner, key: str, *responses: str) -> list[Outcome]:
    futures = [runner.submit(key, Sample(response, "5")) for response in responses]
    return [future.result(timeout=60) for future in futures]


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not (done := true()) and time.monotonic() < end:
        time.sleep(0.02)
    return done


def test_every_fault_at_once_spoils_its_own_sample_only(runner: RewardRunner) -> None:
    """Mutations: run the function in a thread (the power holds the GIL, the test ends here); SIGTERM for SIGKILL; take a dead process for a 0."""
    faults = ["loop", "regex", "exit 3", "kill 9", "kill 11", "leave", "raise boom", "allocate 1000000000", "nan", "text", "no score", "bad metric"]
    runner.canaries.result()
    started = time.monotonic()
    futures = [runner.submit("faulty", Sample(text, "5")) for fault in faults for text in (fault, f"fine after {fault}")]
    hard = runner.submit("math", Sample(r"\boxed{9^{9^{9^9}}}", "5"))
    outcomes = [future.result(timeout=60) for future in futures]
    assert hard.result(timeout=60) == TIMEOUT
    # Three hang, and there are four processes. Mutation: count the limit of all from the beginning of the first, or one after the other.
    assert time.monotonic() - started < LIMIT + SLACK
    assert [outcome.status for outcome in outcomes[1::2]] == ["ok"] * len(faults)
    assert [outcome.score for outcome in outcomes[1::2]] == [float(len(f"fine after {fault}")) for fault in faults]
    said = {fault: (outcome.status, outcome.reason) for fault, outcome in zip(faults, outcomes[::2], strict=True)}
    assert {outcome.score for outcome in outcomes[::2]} == {0.0}
    assert said == {
        "loop": ("timeout", TIMEOUT.reason),
        "regex": ("timeout", TIMEOUT.reason),
        "exit 3": ("error", "its process ended with exit code 3"),
        "kill 9": ("error", "its process was ended by SIGKILL"),
        "kill 11": ("error", "its process was ended by SIGSEGV"),
        "leave": ("error", "raised SystemExit: 0"),
        "raise boom": ("error", "raised ValueError: boom"),
        "allocate 1000000000": ("error", "raised MemoryError: "),  # Mutation: leave the limit out.
        "nan": ("error", "gave nan; it must give a finite number"),
        "text": ("error", "gave '1'; it must give a finite number"),
        "no score": ("error", "gave a dict with value in it; it must hold score"),
        "bad metric": ("error", "gave 'high' as 'clarity'; it must give a finite number"),
    }


@pytest.mark.parametrize("response", ["infinity", "none", "complex", "list", "huge", "spiteful", "function"])
def test_what_is_no_finite_number_is_an_error(runner: RewardRunner, response: str) -> None:
    # Mutation: float(answer) without the checks; send the answer as it is (a function cannot be sent at all).
    (outcome,) = ask(runner, "faulty", response)
    assert (outcome.status, outcome.score) == ("error", 0.0)
    assert outcome.reason


def test_a_dict_brings_further_numbers(runner: RewardRunner) -> None:
    assert ask(runner, "faulty", "dict") == [Outcome("ok", 0.5, {"clarity": 2.0})]


def test_what_a_function_prints_does_not_disturb_the_answers(runner: RewardRunner) -> None:
    # Mutation: answers over stdout.
    assert [outcome.score for outcome in ask(runner, "faulty", "print", "ab")] == [5.0, 2.0]


def test_order_is_kept_whatever_takes_how_long(runner: RewardRunner) -> None:
    # Mutation: outcomes in the order in which they come.
    chance = random.Random(0)
    responses = [f"sleep {chance.uniform(0, 0.05):.{3 + number % 7}f}" for number in range(40)]
    for key in ("faulty", "awaited"):
        assert [outcome.score for outcome in ask(runner, key, *responses)] == [float(len(response)) for response in responses]


def test_the_limit_counts_from_the_beginning_of_a_call_not_of_the_waiting() -> None:
    # Twelve of 0.4 s on one process take 4.8 s. Mutation: a deadline at submit: the last time out.
    runner = RewardRunner({"faulty": FUNCTIONS["faulty"]}, CONFIG.model_copy(update={"processes": 1, "max_processes": 1}))
    try:
        assert {outcome.status for outcome in ask(runner, "faulty", *["sleep 0.4"] * 12)} == {"ok"}
    finally:
        runner.close()


def test_calls_that_hang_wait_side_by_side_and_the_processes_are_as_few_afterwards() -> None:
    # Twelve on two processes would take six limits. Mutations: `_long` gives 0; nothing is forked until something is heard; no process is given up.
    runner = RewardRunner({"faulty": FUNCTIONS["faulty"]}, CONFIG.model_copy(update={"processes": 2, "max_processes": 16}))
    try:
        runner.canaries.result()
        started = time.monotonic()
        outcomes = ask(runner, "faulty", *["loop"] * 6, "fine", *["sleep 30"] * 6)
        assert time.monotonic() - started < 4 * LIMIT
        assert outcomes == [TIMEOUT] * 6 + [Outcome("ok", 4.0)] + [TIMEOUT] * 6
        assert ask(runner, "faulty", *["ab"] * 4) == [Outcome("ok", 2.0)] * 4
        assert until(lambda: len(runner.pids()) == 2)
    finally:
        runner.close()


def test_async_calls_run_side_by_side_and_each_has_the_limit(runner: RewardRunner) -> None:
    started = time.monotonic()
    outcomes = ask(runner, "awaited", "sleep 30", *["sleep 0.6"] * 20, "raise boom")
    # Mutation: one after the other (12 s and more on four processes only with the limit broken): each has its 0.6 s.
    assert time.monotonic() - started < LIMIT + SLACK
    assert outcomes[0] == TIMEOUT
    assert {outcome.status for outcome in outcomes[1:-1]} == {"ok"}
    assert outcomes[-1].reason == "raised ValueError: boom"


@pytest.mark.parametrize("fault", ["loop", "exit 3", "stubborn"])
def test_an_async_function_that_blocks_its_loop_or_ends_its_process_spoils_its_own_sample_only(runner: RewardRunner, fault: str) -> None:
    # Mutation: blame all that were on their way.
    responses = ["sleep 0.3", "a", fault, "sleep 0.21", "bcd"]
    outcomes = ask(runner, "awaited", *responses)
    assert [outcome.status for outcome in outcomes] == ["ok", "ok", "error" if fault == "exit 3" else "timeout", "ok", "ok"]
    assert [outcome.score for outcome in outcomes] == [9.0, 1.0, 0.0, 10.0, 3.0]


@pytest.mark.parametrize(
    ("fault", "status"), [("loop", "timeout"), ("exit 3", "error"), ("raise boom", "error"), ("too few", "error"), ("nan", "error")]
)
def test_of_a_batch_only_the_sample_that_is_to_blame_fails(runner: RewardRunner, fault: str, status: str) -> None:
    # Mutation: give the batch's outcome to each of its samples.
    outcomes = ask(runner, "together", "a", "bb", fault, "cccc", "ddddd", "ffffff")
    assert [outcome.status for outcome in outcomes] == ["ok", "ok", status, "ok", "ok", "ok"]
    assert [outcome.score for outcome in outcomes] == [1.0, 2.0, 0.0, 4.0, 5.0, 6.0]


def test_a_function_that_keeps_memory_gets_a_fresh_process_before_it_fails() -> None:
    # 50 x 40 MB are four times the limit. Mutation: never retire a process: the thirteenth sample is an error for what the others left.
    runner = RewardRunner({"faulty": FUNCTIONS["faulty"]}, CONFIG.model_copy(update={"processes": 1}))
    try:
        outcomes = ask(runner, "faulty", *["keep 40000000"] * 50)
        assert {outcome.status for outcome in outcomes} == {"ok"}
        assert max(outcome.score for outcome in outcomes) < 500 / 40
    finally:
        runner.close()


def test_a_killed_process_is_replaced(runner: RewardRunner) -> None:
    # Mutation: forget the dead process without a new one: with the fourth, nobody answers.
    before = runner.pids()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert until(lambda: len(runner.pids()) == 4 and not set(before) & set(runner.pids()))
    assert [outcome.score for outcome in ask(runner, "faulty", *"abcdefgh")] == [1.0] * 8


def test_nothing_is_left_after_close_and_nobody_waits_for_ever() -> None:
    runner = RewardRunner({"faulty": FUNCTIONS["faulty"]}, CONFIG.model_copy(update={"time_limit_seconds": 1000.0, "processes": 2}))
    (child,) = (int(outcome.score) for outcome in ask(runner, "faulty", "child"))
    hanging = [runner.submit("faulty", Sample("loop", "")) for _ in range(3)]
    pids = [child, *runner.pids()]
    assert all(map(alive, pids))
    runner.close()
    # Mutation: kill the process alone, and not its group: what a reward started lives on.
    assert until(lambda: not any(map(alive, pids)))
    for future in [*hanging, runner.submit("faulty", Sample("a", ""))]:
        with pytest.raises(RewardError, match="closed"):
            future.result(timeout=5)


def test_a_parent_that_is_killed_takes_busy_processes_along() -> None:
    # Mutation: leave out PR_SET_PDEATHSIG: a loop in C never reads that the connection is at its end.
    code = """
        import sys, time
        from engine.config import RewardRunnerConfig
        from engine.rewards.runner import RewardRunner
        from engine.rewards.types import Function, Sample
        runner = RewardRunner({"f": Function("faulty_rewards:faulty")}, RewardRunnerConfig(processes=2, max_processes=2, time_limit_seconds=1000.0))
        runner.submit("f", Sample("a", "")).result()
        for _ in range(2):
            runner.submit("f", Sample("power", ""))
        time.sleep(0.5)
        print(*runner.pids(), flush=True)
        time.sleep(1000)
    """
    path = os.pathsep.join(sys.path)
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert parent.stdout is not None
    with parent:
        try:
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert len(pids) == 2
            assert all(map(alive, pids))
        finally:
            parent.kill()
    assert until(lambda: not any(map(alive, pids)))


def test_the_processes_know_neither_torch_nor_ray() -> None:
    # Mutation: import engine.config in engine.rewards.process.
    code = "import sys, engine.rewards.process; sys.exit(bool({'torch', 'ray', 'pydantic', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}).returncode == 0


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (Function("faulty_rewards:told", {"factr": 2}), "faulty_rewards:told has no parameter factr; it has: factor"),
        (Function("faulty_rewards:told", {"finished": True}), "finished come with each sample and cannot be parameters"),
        (Function("faulty_rewards:faulty", samples_at_once=2), "is called with one sample after the other; take samples_at_once out"),
        (Function("os:getpid"), "os:getpid takes nothing of a sample; name parameters response, ground_truth"),
        (Function("faulty_rewards:needs"), "faulty_rewards:needs needs factor: set it in parameters"),
    ],
)
def test_a_function_that_cannot_be_called_is_named_before_it_is(function: Function, text: str) -> None:
    # Mutation: leave out any of the checks: a TypeError with the first sample, and with every one.
    with pytest.raises(ValueError, match=text):
        Call.of(REWARDS.get(function.name), function)


def test_a_function_that_cannot_be_loaded_is_named_when_the_runner_starts() -> None:
    # Mutation: load it when the first sample comes.
    runner = RewardRunner({"own": Function("no_such_module:reward")}, CONFIG)
    try:
        for future in (runner.canaries, runner.submit("own", Sample("a", ""))):
            with pytest.raises(RewardError, match=r"no_such_module:reward cannot be imported .*PYTHONPATH"):
                future.result(timeout=60)
    finally:
        runner.close()


def test_a_module_that_ends_the_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends_it_all.py").write_text("import os\nos._exit(7)")
    monkeypatch.syspath_prepend(tmp_path)
    runner = RewardRunner({"own": Function("ends_it_all:reward")}, CONFIG)
    try:
        with pytest.raises(RewardError, match="ended while it loaded ends_it_all:reward"):
            runner.canaries.result(timeout=60)
    finally:
        runner.close()


def test_a_function_is_told_what_its_parameters_name() -> None:
    runner = RewardRunner({"told": Function("faulty_rewards:told", {"factor": 0.5})}, CONFIG.model_copy(update={"processes": 1}))
    try:
        sample = Sample("r", "g", ({"role": "user", "content": "?"},) * 3, "sums", 8, False)
        outcome = runner.submit("told", sample).result(timeout=60)
        assert outcome == Outcome("ok", 4.0, {"messages": 3.0, "finished": 0.0, "source": 4.0})
        # Parameters of one call alone, as canaries have them.
        assert runner.submit("told", sample, {"factor": 2.0}).result(timeout=60).score == 16.0
        assert runner.submit("told", sample).result(timeout=60).score == 4.0
    finally:
        runner.close()


def test_without_the_process_that_forks_the_others_nobody_waits_for_ever() -> None:
    # Mutation: let the thread end with the EOFError.
    runner = RewardRunner({"faulty": FUNCTIONS["faulty"]}, CONFIG)
    assert ask(runner, "faulty", "a") == [Outcome("ok", 1.0)]
    waiting = [runner.submit("faulty", Sample("sleep 0.5", "")) for _ in range(50)]
    pids = runner.pids()
    source = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(source, signal.SIGKILL)
    with pytest.raises(RewardError, match="the process that loads and forks the rewards has ended"):
        waiting[-1].result(timeout=30)
    runner.close()
    assert until(lambda: not any(map(alive, pids)))


def test_many_samples_at_once_do_not_fill_a_pipe(runner: RewardRunner) -> None:
    # Mutation: wake the thread once a sample: it waits for the lock that the one who wakes it holds.
    assert {outcome.score for outcome in ask(runner, "faulty", *["abc"] * 3000)} == {3.0}
    long = "x" * 3_000_000
    assert [outcome.score for outcome in ask(runner, "together", *[long] * 4)] == [3e6] * 4


def test_forever_is_longer_than_any_limit_here() -> None:
    assert FOREVER > 100 * (LIMIT + SLACK)

"""The single controller: how calls are spread and gathered, and that whatever goes wrong in a worker is said at once, by name."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from conftest import CPUS
from light_workers import LightWorker

from engine.batch import Batch
from engine.config import PoolConfig, ResourcesConfig
from engine.control.deadline import WorkerError
from engine.control.dispatch import Share
from engine.control.future import BatchFuture, join, stack
from engine.control.host import FromWorkers, WorkerHost
from engine.control.resources import Pool, ResourceError, open_pools
from engine.control.worker_group import WorkerGroup
from engine.trainer.session import import_path

DEADLINE_SECONDS = 120.0


class Opened:
    """A pool with one group of light workers in it."""

    def __init__(self, stack: ExitStack, ranks: int, resources: dict[str, Any]) -> None:
        config = ResourcesConfig(ranks=ranks, device="cpu", call_deadline_seconds=DEADLINE_SECONDS, **resources)
        self.pool = stack.enter_context(open_pools(config, ["main"], {"cpu": {"ALMANAC_TEST": "seen"}}))["main"]
        self.group = light(self.pool)


def light(pool: Pool, role: str = "light") -> WorkerGroup:
    return WorkerGroup(role, LightWorker, {"greeting": "hello"}, pool, DEADLINE_SECONDS)


@contextmanager
def opened(ranks: int = 2, **resources: Any) -> Iterator[Opened]:
    with ExitStack() as stack:
        yield Opened(stack, ranks, resources)


@pytest.fixture(scope="module")
def group(cluster: None) -> Iterator[WorkerGroup]:
    with opened() as found:
        yield found.group


@pytest.fixture(scope="module")
def four(cluster: None) -> Iterator[WorkerGroup]:
    with opened(4) as found:
        yield found.group


def all_gone(processes: list[int]) -> bool:
    """Whether these processes end; a killed one may take a moment."""
    return not psutil.wait_procs([psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)], timeout=60)[1]


def test_all_gives_every_rank_the_same_arguments(group: WorkerGroup) -> None:
    # A list is not split, and keywords arrive as keywords. Mutation: `split` for Dispatch.ALL too.
    assert group.describe([1, 2, 3], suffix="!").get() == [(0, 2, "hello", [1, 2, 3], "!"), (1, 2, "hello", [1, 2, 3], "!")]


def test_workers_import_from_where_the_caller_does(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The cluster was there before, and its processes know nothing of this variable. Mutations: leave PYTHONPATH out of what workers are given;
    # pass relative directories on; put it in the place of the node's own.
    node = os.environ.get("PYTHONPATH", "")
    (tmp_path / "of_ones_own.py").write_text("answer = 42")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "further_down.py").write_text("answer = 43")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.path.relpath(tmp_path / "deeper"), ""]))
    config = ResourcesConfig(ranks=1, device="cpu")
    with open_pools(config, ["main"], {"cpu": import_path()}) as pools:
        workers = light(pools["main"])
        assert workers.attribute("of_ones_own", "answer").get() == [42]
        assert workers.attribute("further_down", "answer").get() == [43]
        (path,) = workers.variable("PYTHONPATH").get()
    assert path.split(os.pathsep)[:2] == [str(tmp_path), str(tmp_path / "deeper")]
    assert path.endswith(node)


def test_nothing_is_passed_on_where_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation: a path of the node's own alone, which an empty entry would make the working directory of.
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert import_path() == {}


def test_all_resolves_a_future(group: WorkerGroup) -> None:
    answers = group.describe(group.tag([5, 6, 7])).get()
    assert [answer[3] for answer in answers] == [[(0, 5), (0, 6), (1, 7)]] * 2


def test_data_parallel_cuts_lists_in_order(group: WorkerGroup) -> None:
    # Contiguous parts, the longer first, other arguments to all. Mutations: `argument[rank::ranks]` in `split`; results gathered as they come.
    assert group.tag([1, 2, 3, 4, 5], factor=10).get() == [(0, 10), (0, 20), (0, 30), (1, 40), (1, 50)]


def test_data_parallel_takes_fewer_items_than_ranks(group: WorkerGroup) -> None:
    assert group.tag([1]).get() == [(0, 1)]
    assert group.tag([]).get() == []


def test_data_parallel_cuts_batches_in_order(group: WorkerGroup) -> None:
    ids = torch.arange(15).view(5, 3)
    answer = group.tag_rows(Batch(tensors={"input_ids": ids}, objects={"name": list("abcde")}, meta={"step": 4})).get()
    assert torch.equal(answer.tensors["input_ids"], ids)
    assert answer.tensors["rank"].tolist() == [0, 0, 0, 1, 1]
    assert answer.objects["name"] == list("abcde")
    assert answer.meta == {"step": 4}


def test_futures_go_from_worker_to_worker(group: WorkerGroup) -> None:
    sealed = group.seal([1, 2, 3], os.getpid())
    # Mutation: `argument.get()` first thing in `WorkerGroup._value`: the sealed values come here, which they do not allow.
    assert group.count_sealed(sealed).get() == [(0, 1), (0, 2), (1, 3)]
    # Else the test could not fail.
    with pytest.raises(ray.exceptions.RayError, match="must not pass"):
        ray.get(sealed.parts.references[0])


@pytest.mark.parametrize("rows", range(1, 18))
def test_ragged_batches_come_back_between_groups_of_other_sizes(group: WorkerGroup, four: WorkerGroup, rows: int) -> None:
    lengths = [1 + (7 * row) % 5 for row in range(rows)]
    made = group.make(lengths)
    # Two ranks make, four double, two subtract: every row meets itself, whatever its rank padded it to. Mutations: shares by the number of
    # the making ranks; columns joined without `aligned`.
    found = group.subtract(join(made, four.double(made))).get()
    assert found.tensors["value"].tolist() == lengths
    assert not found.tensors["zero"].any()
    # Padding of ranks without a row reaches no statistic.
    assert four.mean(made).get().result()["value"] == sum(lengths) / rows


def test_rows_in_another_order_without_a_detour(group: WorkerGroup, four: WorkerGroup) -> None:
    made = group.make([1, 2, 3, 4, 5])
    order = [4, 2, 0, 1, 3]
    turned = made.rows(order)
    # Mutation: compose two orders the wrong way round.
    assert turned.get().objects["name"] == ["5", "3", "1", "2", "4"]
    assert turned.rows(order).get().objects["name"] == ["4", "1", "5", "3", "2"]
    assert four.subtract(join(turned, four.double(made).rows(order))).get().tensors["value"].tolist() == [5, 3, 1, 2, 4]
    with pytest.raises(ValueError, match="there is no row 5: the parts have 5 rows"):
        made.rows([0, 5]).get()


def test_some_rows_of_several_calls(group: WorkerGroup, four: WorkerGroup) -> None:
    # Calls of 3 and 4 rows on two ranks, some of whose rows go to four, which get 2, 1, 1 and 1. Mutations: sizes of the first call for all;
    # parts in another order than the calls' reports.
    made = stack([group.make([1, 2, 3]), group.make([4, 5, 6, 7])])
    assert made.get().objects["name"] == ["1", "2", "3", "4", "5", "6", "7"]
    chosen = made.rows([6, 0, 0, 3, 4])
    found = four.subtract(join(chosen, four.double(chosen))).get()
    assert found.tensors["value"].tolist() == [7, 1, 1, 4, 5]
    assert not found.tensors["zero"].any()
    with pytest.raises(ValueError, match="rows are chosen after calls are stacked"):
        stack([made, chosen])


def test_a_mesh_of_pairs(four: WorkerGroup) -> None:
    # Both ranks of a pair do the work, one of them speaks. Mutation: gather from every rank.
    assert four.tag_in_pairs([1, 2, 3]).get() == [(0, 1), (0, 2), (2, 3)]
    # From pairs to all ranks.
    assert four.tag(four.tag_in_pairs([1, 2, 3])).get() == [(0, (0, 1)), (1, (0, 2)), (2, (2, 3))]


def test_a_mode_of_ones_own(group: WorkerGroup) -> None:
    # Mutation: shares asked of DATA_PARALLEL instead of the registered mode, for values or for futures.
    assert group.tag_backwards([1, 2, 3]).get() == [(0, 3), (1, 1), (1, 2)]
    assert group.tag_backwards(group.tag([1, 2, 3])).get() == [(0, (1, 3)), (1, (0, 1)), (1, (0, 2))]


def test_rank_zero_and_each(group: WorkerGroup, four: WorkerGroup) -> None:
    # Rank 0 alone, with all rows, wherever they lie.
    assert group.first_alone(four.tag([1, 2, 3])).get() == [(0, (0, 1)), (0, (1, 2)), (0, (2, 3))]
    # Its result is cut like any other.
    assert group.tag(group.first_alone([1, 2, 3])).get() == [(0, (0, 1)), (0, (0, 2)), (1, (0, 3))]
    assert group.one_each(["a", "b"], common="c").get() == [(0, "a", "c"), (1, "b", "c")]
    assert group.one_each(group.process_id()).get() == [(rank, pid, None) for rank, pid in enumerate(group.process_id().get())]
    with pytest.raises(ValueError, match="3 items cannot go to 2 ranks"):
        group.one_each([1, 2, 3])


def test_work_beside_the_other_work(group: WorkerGroup) -> None:
    busy = group.sleep(4.0)
    # Sent later and done sooner: the second thread does not wait for the first. Mutation: drop `beside` in `WorkerGroup._call`.
    ray.get([call.report for call in group.heard_so_far().calls])
    done, _ = ray.wait([call.report for call in busy.calls], num_returns=2, timeout=0)
    assert not done
    busy.get()


def test_workers_tell_each_other(group: WorkerGroup, four: WorkerGroup) -> None:
    outlet = four.outlet("hear")
    group.speak(outlet, 6).get()
    deadline = time.monotonic() + 30
    while (heard := four.heard_so_far().get()) != [[0, 1], [2, 3], [4], [5]] and time.monotonic() < deadline:
        time.sleep(0.05)
    # Each row goes to the rank whose share of all rows it will be. Mutation: `row % parts`.
    assert heard == [[0, 1], [2, 3], [4], [5]]


def test_what_is_told_in_vain_disturbs_nobody(group: WorkerGroup, four: WorkerGroup) -> None:
    before = four.heard_so_far().get()
    # No such method over there. Mutation: let it raise: the worker is none the worse, but nobody finds the reason in a log.
    group.speak(four.outlet("mishear"), 6).get()
    assert four.heard_so_far().get() == before


def test_one_thread_takes_what_lies_in_workers(group: WorkerGroup) -> None:
    # Two threads that borrow the same object can wait for it for ever (see `WorkerHost`). Mutation: `fetch` without a group of its own, or
    # arguments put together in the thread that uses them.
    carried = group.carry([1, 2])
    first, second = group.threads(carried), group.threads_beside(carried)
    for (arrived, own), (arrived_beside, beside) in zip(first.get(), second.get(), strict=True):
        assert arrived == arrived_beside
        assert len({arrived, own, beside}) == 3


def test_two_roles_in_one_process(cluster: None) -> None:
    with opened() as found:
        second = light(found.pool, "second")
        assert second.process_id().get() == found.group.process_id().get()
        assert second.tag(found.group.tag([1, 2])).get() == [(0, (0, 1)), (1, (1, 2))]
        with pytest.raises(WorkerError, match=r"^second rank \d, explode_over raised"):
            found.group.tag(second.explode_over([1, 2])).get()


def test_a_result_without_meaning_as_a_whole_is_refused(group: WorkerGroup) -> None:
    with pytest.raises(TypeError, match=r"must return a Batch or a list, not int"):
        group.meaningless([1, 2]).get()


def test_what_passes_through_the_controller_is_counted(group: WorkerGroup) -> None:
    recorder = group.recorder
    recorder.begin("test", 1)
    made = group.make(list(range(50)))
    group.double(made).rows(list(reversed(range(50))))
    measured = group.mean(made).get()
    trace = recorder.finish()
    assert measured.result() == {"value": 24.5}
    make, double, mean = trace.operations
    assert [operation.operator for operation in trace.operations] == ["make", "double", "mean"]
    # 25 x 24 and 25 x 49 int64, and more: they go from worker to worker, and the controller sees fifty small numbers and a mean.
    assert make.result_bytes > (25 * 24 + 25 * 49) * 8
    assert [(edge.source, edge.target) for edge in trace.edges] == [(make.id, double.id), (make.id, mean.id)]
    assert all(edge.bytes >= make.result_bytes for edge in trace.edges)
    # Mutation: `passed` left out where a value is sent, or where one is fetched.
    assert 100 < trace.controller_bytes < 2000
    assert trace.batch_bytes == sum(operation.result_bytes for operation in trace.operations)


@pytest.mark.parametrize("name", ["exploed", "unregistered"])
def test_unknown_methods(group: WorkerGroup, name: str) -> None:
    with pytest.raises(AttributeError, match=f"light workers have no registered method '{name}'"):
        getattr(group, name)


def test_a_method_that_raises_is_named_though_others_are_silent(group: WorkerGroup, tmp_path: Path) -> None:
    # Mutation: wait for all ranks, together or one after the other, before any is looked at: rank 0 waits in vain, or is blamed.
    with pytest.raises(WorkerError, match=r"^light rank 1, explode raised:") as raised:
        group.explode(1, tmp_path / "end").get()
    assert not (tmp_path / "end.in_vain").exists()
    (tmp_path / "end").touch()
    # The worker's own traceback, down to the line.
    assert re.search(r'light_workers\.py", line \d+, in explode', str(raised.value))
    assert str(raised.value).endswith("ArithmeticError: the sum does not come out")
    assert "\x1b" not in str(raised.value)


def test_an_error_further_up_the_dataflow_is_named(group: WorkerGroup) -> None:
    # What failed is explode_over, though it is tag that is waited for. Mutation: no `upstream` in `WorkerGroup._call`.
    with pytest.raises(WorkerError, match=r"^light rank \d, explode_over raised") as raised:
        group.tag(group.explode_over([1, 2])).get()
    assert str(raised.value).endswith("ArithmeticError: the sum does not come out")


def test_silence_is_named_at_the_deadline(group: WorkerGroup, tmp_path: Path) -> None:
    future = group.be_silent(1, tmp_path / "end")
    assert future.deadline_seconds == DEADLINE_SECONDS
    # Mutation: wait for ever, or name every rank.
    with pytest.raises(WorkerError, match=r"^no answer within 2 s \(resources\.call_deadline_seconds\) from: light rank 1, be_silent\n"):
        replace(future, deadline_seconds=2.0).get()
    (tmp_path / "end").touch()


def unanswered(future: BatchFuture) -> str:
    """What the error says where the silent calls stand."""
    with pytest.raises(WorkerError, match=r"^no answer within 2 s .*\n") as raised:
        replace(future, deadline_seconds=2.0).get()
    return str(raised.value).partition("\n")[2]


def said_in_the_end(future: BatchFuture, *patterns: str) -> str:
    """The same, asked again while workers of a busy machine have not come so far."""
    for _ in range(30):
        said = unanswered(future)
        if all(re.search(pattern, said, re.MULTILINE) for pattern in patterns):
            break
    return said


def test_silent_workers_say_where_they_stand(cluster: None, tmp_path: Path) -> None:
    with opened() as found:
        group = found.group
        late = group.tag(group.delay([tmp_path / "a", tmp_path / "b"]))
        # Mutations: ask in the thread of the calls; ask from the controller itself, behind calls that are not yet sent.
        behind = group.sleep(3600.0)
        waiting = group.tag(group.tag([1, 2]))
        # The arguments' thread is told as well, down to the line that keeps it.
        first, second = r"\Alight rank 0, tag waits for its arguments\. Process \d+ stands at\n", r"^light rank 1, tag"
        said = said_in_the_end(late, first, second)
        assert re.match(first, said)
        assert re.search(second, said, re.MULTILINE), said
        assert re.search(r"light_workers\.py:\d+ in wait_for: ", said)
        for name in "ab":
            (tmp_path / name).touch()
        late.get()
        running, line = (
            r"\Alight rank 0, sleep is running\. Process \d+ stands at\n  a thread:\n",
            r"light_workers\.py:\d+ in sleep: time\.sleep\(seconds\)$",
        )
        said = said_in_the_end(behind, running, line)
        assert re.match(running, said)
        assert re.search(line, said, re.MULTILINE)
        # Mutation: say of every silent call that it is running.
        assert re.match(r"light rank 0, tag has not begun\. Process \d+ stands at\n(.*\n)+.* in sleep: ", unanswered(waiting))


class Slow:
    """Stands where a call's results would be taken, and is late with them."""

    def __init__(self) -> None:
        self.asked, self.there = threading.Event(), threading.Event()

    def share(self, sizes: Sequence[int], share: Share) -> list[int]:
        self.asked.set()
        assert self.there.wait(60)
        return [1]

    def origins(self, sizes: Sequence[int], share: Share) -> dict[int, float]:
        return {}


def test_a_call_whose_arguments_are_on_their_way_waits_for_them(cluster: None) -> None:
    # Ray unpickles for one thread of a process at a time, so that the call itself may come in after its arguments.
    host, slow = WorkerHost(None), Slow()
    fetch = threading.Thread(target=host.fetch, args=(7, 0, FromWorkers((slow,), ((),), Share(0, 1))))  # type: ignore[arg-type]
    fetch.start()
    assert slow.asked.wait(60)
    # Mutations: know of a call only from the moment when it begins; forget that the arguments have come.
    assert host.where()[1] == {7: "waits for its arguments"}
    slow.there.set()
    fetch.join()
    assert host.where()[1] == {}


def test_a_stopped_worker_is_said_to_be_stopped(cluster: None) -> None:
    with opened() as found:
        processes = found.group.process_id().get()
        asleep = found.group.sleep(3600.0)
        os.kill(processes[1], signal.SIGSTOP)
        try:
            said = unanswered(asleep)
        finally:
            os.kill(processes[1], signal.SIGCONT)
        # Mutation: wait for all answers, and say nothing where one is missing.
        assert re.match(rf"light rank 0, sleep is running\. Process {processes[0]} stands at\n", said)
        assert re.search(r"^light rank 1, sleep: the process does not say where it stands: ", said, re.MULTILINE)


def kill_one(group: WorkerGroup) -> None:
    # Mutation: catch RayTaskError only.
    with pytest.raises(WorkerError, match=r"^light rank 1, die: the worker's process is gone"):
        group.die(1).get()


def exit_in_a_collective(group: WorkerGroup) -> None:
    # Its peer complains as well, about a closed connection, and may be heard first. Mutation: blame whoever is heard first.
    with pytest.raises(WorkerError, match=r"^light rank 1, exit_in_a_collective: the worker's process is gone"):
        group.exit_in_a_collective(1, *group.pool.address(DEADLINE_SECONDS)).get()


@pytest.mark.parametrize("spoil", [kill_one, exit_in_a_collective])
def test_a_process_that_ends_is_named_and_the_others_end_with_it(cluster: None, spoil: Callable[[WorkerGroup], None]) -> None:
    with opened() as found:
        processes = found.group.process_id().get()
        spoil(found.group)
    # Mutation: `Pool.close` without `ray.kill`: rank 0 sleeps on.
    assert all_gone(processes)


def test_errors_name_the_step(group: WorkerGroup) -> None:
    group.recorder.begin("rl", 12)
    with pytest.raises(WorkerError, match=r"^light rank \d, explode_over, step 12 raised"):
        group.explode_over([1, 2]).get()
    group.recorder.step = None


def test_a_pool_gives_its_environment_and_its_threads(group: WorkerGroup) -> None:
    assert group.variable("ALMANAC_TEST").get() == ["seen", "seen"]
    assert group.variable("OMP_NUM_THREADS").get() == ["1", "1"]


def refused(match: str, *names: str, **resources: Any) -> None:
    config = ResourcesConfig(device="cpu", **resources)
    started = time.monotonic()
    with pytest.raises(ResourceError, match=match), open_pools(config, names or ["main"], {}):
        pass
    # Within the configured ten seconds on a machine that has nothing else to do; a wait without a limit would run into the test's own.
    assert time.monotonic() - started < 60


def test_more_ranks_than_processors(cluster: None) -> None:
    # Mutation: leave the first check out: ten seconds pass, and the message is another.
    refused(rf"^resources\.ranks={CPUS + 1} needs {CPUS + 1} CPUs, and Ray has {CPUS}\. Lower the ranks", ranks=CPUS + 1)


def test_what_all_pools_want_together_is_counted(cluster: None) -> None:
    pools = {"judges": PoolConfig(ranks=CPUS, device="cpu")}
    refused(rf"^resources\.ranks=2, resources\.pools\.judges\.ranks={CPUS} need {CPUS + 2} CPUs", "main", "judges", ranks=2, pools=pools)
    # A resource that only some nodes declare is named like any other.
    refused(r"^resources\.ranks=2 needs 2 moons, and Ray has 0\.", ray_resources_per_rank={"moon": 1.0})


def test_processors_that_others_hold(cluster: None) -> None:
    with opened(1):
        # Mutation: wait for the placement group without a timeout.
        match = rf"resources\.ranks={CPUS} bundles .* within 1 s\. Free are \d of {CPUS} CPUs"
        refused(match, ranks=CPUS, creation_deadline_seconds=1.0)


def test_processors_come_back_at_once(cluster: None) -> None:
    # Ray's account of what is free lags behind. Mutation: refuse at the first look at `available_resources`.
    processes = []
    for _ in range(2):
        with opened(1, cpus_per_rank=CPUS // 2) as found:
            processes += found.group.process_id().get()
    assert len(set(processes)) == 2

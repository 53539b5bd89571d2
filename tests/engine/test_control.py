"""The single controller: how calls are spread and gathered, and that whatever goes wrong in a worker is said at once, by name."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
import torch
from conftest import CPUS
from light_workers import LightWorker

from engine.batch import Batch
from engine.config import ResourcesConfig
from engine.control.deadline import WorkerError
from engine.control.resources import ResourceError
from engine.control.worker_group import WorkerGroup

DEADLINE_SECONDS = 120.0


def open_group(ranks: int = 2, **resources: float) -> WorkerGroup:
    config = ResourcesConfig(ranks=ranks, device="cpu", call_deadline_seconds=DEADLINE_SECONDS, **resources)
    return WorkerGroup("light", LightWorker, {"greeting": "hello"}, config, "cpu", {"ALMANAC_TEST": "seen"})


@pytest.fixture(scope="module")
def group(cluster: None) -> Iterator[WorkerGroup]:
    group = open_group()
    yield group
    group.close()


def all_gone(processes: list[int]) -> bool:
    """Whether these processes end; a killed one may take a moment."""
    return not psutil.wait_procs([psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)], timeout=60)[1]


def test_all_gives_every_rank_the_same_arguments(group: WorkerGroup) -> None:
    # A list is not split, and keywords arrive as keywords. Mutation: `split` for Dispatch.ALL too.
    assert group.describe([1, 2, 3], suffix="!").get() == [(0, 2, "hello", [1, 2, 3], "!"), (1, 2, "hello", [1, 2, 3], "!")]


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
    # Mutation: `argument.get()` first thing in `WorkerGroup._spread`: the sealed values come here, which they do not allow.
    assert group.count_sealed(sealed).get() == [(0, 1), (0, 2), (1, 3)]
    # Else the test could not fail.
    with pytest.raises(ray.exceptions.RayError, match="must not pass"):
        ray.get(sealed.references[0])


def test_a_result_without_meaning_as_a_whole_is_refused(group: WorkerGroup) -> None:
    with pytest.raises(TypeError, match=r"must return a Batch, a list or Statistics, not int"):
        group.meaningless([1, 2]).get()


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
    # What failed is explode_over, though it is tag that is waited for. Mutation: no `.options(name=...)` in `WorkerGroup._call`.
    with pytest.raises(WorkerError, match=r"::light rank \d, explode_over\(\)") as raised:
        group.tag(group.explode_over([1, 2])).get()
    assert str(raised.value).endswith("ArithmeticError: the sum does not come out")


def test_silence_is_named_at_the_deadline(group: WorkerGroup, tmp_path: Path) -> None:
    future = group.be_silent(1, tmp_path / "end")
    assert future.deadline_seconds == DEADLINE_SECONDS
    # Mutation: wait for ever, or name every rank.
    with pytest.raises(WorkerError, match=r"^no answer within 2 s \(resources\.call_deadline_seconds\) from: light rank 1, be_silent$"):
        replace(future, deadline_seconds=2.0).get()
    (tmp_path / "end").touch()


def kill_one(group: WorkerGroup) -> None:
    # Mutation: catch RayTaskError only.
    with pytest.raises(WorkerError, match=r"^light rank 1, die: the worker's process is gone"):
        group.die(1).get()


def exit_in_a_collective(group: WorkerGroup) -> None:
    # Its peer complains as well, about a closed connection.
    with pytest.raises(WorkerError, match=r"^light rank 1, exit_in_a_collective: the worker's process is gone"):
        group.exit_in_a_collective(1, *group.rendezvous()).get()


@pytest.mark.parametrize("spoil", [kill_one, exit_in_a_collective])
def test_a_process_that_ends_is_named_and_close_ends_the_others(cluster: None, spoil: Callable[[WorkerGroup], None]) -> None:
    group = open_group()
    processes = group.process_id().get()
    spoil(group)
    # Mutation: `close` without `ray.kill`: rank 0 sleeps on.
    group.close()
    assert all_gone(processes)


def test_more_ranks_than_processors(cluster: None) -> None:
    # Mutation: leave the first check out: ten seconds pass, and the message is another.
    with pytest.raises(ResourceError, match=rf"^resources\.ranks={CPUS + 1} needs {CPUS + 1} CPUs, and Ray has {CPUS}\. Lower resources\.ranks"):
        open_group(ranks=CPUS + 1)


def test_processors_that_others_hold(cluster: None) -> None:
    held = open_group(ranks=1)
    # Mutation: wait for the placement group without a timeout.
    with pytest.raises(ResourceError, match=rf"resources\.ranks={CPUS} bundles .* within 1 s\. Free are \d of {CPUS} CPUs"):
        open_group(ranks=CPUS, creation_deadline_seconds=1.0)
    held.close()


def test_processors_come_back_at_once(cluster: None) -> None:
    # Ray's account of what is free lags behind. Mutation: refuse at the first look at `available_resources`.
    processes = []
    for _ in range(2):
        group = open_group(ranks=1, cpus_per_rank=CPUS // 2)
        processes += group.process_id().get()
        group.close()
    assert len(set(processes)) == 2

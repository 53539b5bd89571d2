"""The ranks of one role, called as if they were one object."""

import functools
import socket
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.config import ResourcesConfig
from engine.control.deadline import Call, wait
from engine.control.dispatch import Dispatch, gather, split
from engine.control.future import BatchFuture
from engine.control.resources import reserve


class WorkerHost:
    """The Ray actor: holds one worker and runs its methods.

    Ray resolves object references only among the arguments of a call itself, so every argument travels as one of those.
    """

    def __init__(self, worker_class: type, arguments: Mapping[str, Any]) -> None:
        self._worker = worker_class(**arguments)

    def call(self, method: str, keywords: tuple[str, ...], *arguments: Any) -> Any:
        """Runs `method` with `arguments`, the last `len(keywords)` of them by name."""
        positional = len(arguments) - len(keywords)
        return getattr(self._worker, method)(*arguments[:positional], **dict(zip(keywords, arguments[positional:], strict=True)))

    def free_address(self) -> tuple[str, int]:
        """This node's address and a port that is free on it, for the ranks to meet at."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]


class WorkerGroup:
    """`ranks` workers of one class, each in its own process; every `@register`ed method of the class is a method of the group.

    `arguments` are given to each worker's constructor as they are; `rank`, `world_size`, `master_address` and `master_port` come in `start`.
    """

    def __init__(
        self,
        role: str,
        worker_class: type,
        arguments: Mapping[str, Any],
        resources: ResourcesConfig,
        device: str,
        environment: Mapping[str, str],
    ) -> None:
        self.role = role
        self.ranks = resources.ranks
        self._deadline_seconds = resources.call_deadline_seconds
        self._placement = reserve(resources, device)
        host = ray.remote(WorkerHost)
        self._hosts = [
            host.options(
                num_cpus=resources.cpus_per_rank,
                num_gpus=1 if device == "cuda" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank),
                runtime_env={"env_vars": {**environment, "OMP_NUM_THREADS": str(resources.cpus_per_rank)}},
            ).remote(worker_class, {**arguments, "rank": rank, "world_size": self.ranks})
            for rank in range(self.ranks)
        ]
        for name in dir(worker_class):
            dispatch = getattr(getattr(worker_class, name), "__dispatch__", None)
            if dispatch is not None:
                setattr(self, name, functools.partial(self._call, name, dispatch))

    def __getattr__(self, name: str) -> Callable[..., BatchFuture]:
        raise AttributeError(f"{self.role} workers have no registered method {name!r}")

    def rendezvous(self) -> tuple[str, int]:
        """An address on rank 0's node where a process group can meet. Returns (host, port). Raises `WorkerError`."""
        (address,) = wait([self._hosts[0].free_address.remote()], [Call(self.role, 0, "free_address")], self._deadline_seconds)
        return address

    def _call(self, method: str, dispatch: Dispatch, *arguments: Any, **keyword_arguments: Any) -> BatchFuture:
        """Sends one call to every rank and returns at once."""
        spread = [self._spread(dispatch, argument) for argument in (*arguments, *keyword_arguments.values())]
        calls = [Call(self.role, rank, method) for rank in range(self.ranks)]
        references = [
            # Named, so that an error that comes down the dataflow tells where it began.
            host.call.options(name=str(call)).remote(method, tuple(keyword_arguments), *(parts[call.rank] for parts in spread))
            for host, call in zip(self._hosts, calls, strict=True)
        ]
        return BatchFuture(references, calls, gather if dispatch is Dispatch.DATA_PARALLEL else list, self._deadline_seconds)

    def _spread(self, dispatch: Dispatch, argument: Any) -> list[Any]:
        """One value or reference for each rank."""
        if isinstance(argument, BatchFuture):
            if dispatch is Dispatch.DATA_PARALLEL and len(argument.references) == self.ranks:
                return list(argument.references)
            argument = argument.get()
        if dispatch is Dispatch.DATA_PARALLEL:
            return split(argument, self.ranks)
        return [ray.put(argument)] * self.ranks if self.ranks > 1 else [argument]

    def close(self) -> None:
        """Kills every worker and gives the devices back."""
        for host in self._hosts:
            ray.kill(host)
        remove_placement_group(self._placement)

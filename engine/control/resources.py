"""Reserves the devices of all pools, or says within a deadline what is short."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.config import MAIN_POOL, PoolConfig, ResourcesConfig
from engine.control.deadline import Call, wait
from engine.control.host import WorkerHost
from engine.hardware import Device, resolve_device


class ResourceError(ValueError):
    """Ray cannot give the devices that the configuration asks for."""


class Pool:
    """Processes on reserved devices. Roles are put into them by `WorkerGroup`."""

    def __init__(self, name: str, config: PoolConfig, placement: PlacementGroup, environment: Mapping[str, str], log_directory: Path | None) -> None:
        self.name, self.config = name, config
        self.device: Device = resolve_device(config.device)
        self._placement = placement
        host = ray.remote(concurrency_groups={"beside": 1, "fetch": 1, "inquiry": 1})(WorkerHost)
        self.hosts: list[Any] = [
            host.options(
                num_cpus=config.cpus_per_rank,
                num_gpus=1 if self.device == "cuda" else 0,
                resources=dict(config.ray_resources_per_rank),
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank),
                runtime_env={"env_vars": {**environment, "OMP_NUM_THREADS": str(config.threads_per_rank)}},
            ).remote(None if log_directory is None else log_directory / f"{name}_rank_{rank}.log")
            for rank in range(config.ranks)
        ]

    def ask(self, operator: str, seconds: float, arguments: Sequence[tuple[Any, ...]], ranks: Sequence[int] | None = None) -> list[Any]:
        """Calls a method of the hosts themselves, one tuple of arguments a rank; waits for the results. Raises `WorkerError`."""
        chosen = range(len(self.hosts)) if ranks is None else ranks
        references = [getattr(self.hosts[rank], operator).remote(*given) for rank, given in zip(chosen, arguments, strict=True)]
        calls = [Call(self.name, rank, operator, report=reference, host=self.hosts[rank]) for rank, reference in zip(chosen, references, strict=True)]
        return wait(calls, seconds)

    def address(self, seconds: float) -> tuple[str, int]:
        """Where the ranks can meet: rank 0's node and a free port on it."""
        (address,) = self.ask("free_address", seconds, [()], ranks=[0])
        return address

    def connect(self, seconds: float) -> None:
        """One process group over all ranks of the pool."""
        address, ranks = self.address(seconds), len(self.hosts)
        self.ask("connect", seconds, [(address, rank, ranks, self.device, seconds) for rank in range(ranks)])

    def close(self) -> None:
        """Kills every process and gives the devices back."""
        for host in self.hosts:
            ray.kill(host)
        remove_placement_group(self._placement)


@contextmanager
def open_pools(
    config: ResourcesConfig, names: Sequence[str], environment: Mapping[Device, Mapping[str, str]], log_directory: Path | None = None
) -> Iterator[dict[str, Pool]]:
    """The pools with these names, by name; whatever happens inside, their processes are killed at the end.

    Raises `ResourceError` within `creation_deadline_seconds`, naming the pool and the resource that is short.
    """
    wanted = {name: config.pool(name) for name in dict.fromkeys(names)}
    _check_totals(wanted)
    placements: dict[str, PlacementGroup] = {}
    pools: dict[str, Pool] = {}
    end = time.monotonic() + config.creation_deadline_seconds
    try:
        for name, pool in wanted.items():
            placements[name] = placement_group([_bundle(pool)] * pool.ranks, strategy="PACK")
        for name, pool in wanted.items():
            _await(name, pool, placements[name], end, config.creation_deadline_seconds)
        for name, pool in wanted.items():
            pools[name] = Pool(name, pool, placements[name], environment.get(resolve_device(pool.device), {}), log_directory)
        yield pools
    finally:
        for opened in pools.values():
            opened.close()
        for name, placement in placements.items():
            if name not in pools:
                remove_placement_group(placement)


def _bundle(pool: PoolConfig) -> dict[str, float]:
    """What Ray has to reserve for one rank."""
    return {"CPU": pool.cpus_per_rank} | ({"GPU": 1.0} if resolve_device(pool.device) == "cuda" else {}) | dict(pool.ray_resources_per_rank)


def _check_totals(pools: Mapping[str, PoolConfig]) -> None:
    """Refuses at once what the cluster could not give if it were empty."""
    owned = ray.cluster_resources()
    totals: dict[str, float] = {}
    for pool in pools.values():
        for resource, each in _bundle(pool).items():
            totals[resource] = totals.get(resource, 0.0) + each * pool.ranks
    for resource, total in totals.items():
        if total > owned.get(resource, 0.0) + 1e-9:
            takers = [name for name, pool in pools.items() if resource in _bundle(pool)]
            keys = ", ".join(f"{_key(name)}={pools[name].ranks}" for name in takers)
            verb = "needs" if len(takers) == 1 else "need"
            raise ResourceError(f"{keys} {verb} {total:g} {resource}s, and Ray has {owned.get(resource, 0.0):g}. Lower the ranks or add nodes.")


def _await(name: str, pool: PoolConfig, placement: PlacementGroup, end: float, seconds: float) -> None:
    # What others hold now, or held a moment ago, may still come free: only the deadline decides.
    ready, _ = ray.wait([placement.ready()], timeout=max(0.0, end - time.monotonic()))
    if not ready:
        bundle, owned, available = _bundle(pool), ray.cluster_resources(), ray.available_resources()
        free = ", ".join(f"{available.get(resource, 0.0):g} of {owned.get(resource, 0.0):g} {resource}s" for resource in bundle)
        raise ResourceError(
            f"Ray could not reserve {_key(name)}={pool.ranks} bundles of {bundle} within {seconds:g} s. "
            f"Free are {free}; each bundle needs one node that has all of it. Lower the ranks, or stop what holds the rest."
        )


def _key(name: str) -> str:
    return "resources.ranks" if name == MAIN_POOL else f"resources.pools.{name}.ranks"

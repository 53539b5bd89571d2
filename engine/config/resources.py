"""Which role sits on which devices."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.config.base import Name, Positive, Settings

MAIN_POOL = "main"
ROLES = ("actor", "reward", "reference", "critic")
"""Roles that the engine has by itself; annotators are named by the recipe."""


class PoolConfig(Settings):
    """Processes of one kind and the devices under them. The roles of a pool share its processes."""

    ranks: Positive = 2
    """Processes; each holds one shard of every role in the pool."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpus_per_rank: Annotated[float, Field(gt=0)] = 1.0
    """Ray CPUs of each rank; its numerical libraries use as many threads, at least one. Pools that take turns may share a core: 0.5."""
    ray_resources_per_rank: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Custom Ray resources of each rank: they tie a pool to the nodes that were started with them."""

    @property
    def threads_per_rank(self) -> int:
        """Threads that a rank computes with."""
        return max(1, int(self.cpus_per_rank))


class ResourcesConfig(PoolConfig):
    """The pool `main`, further pools, and the roles that sit in those. A role that is not named sits in `main`."""

    pools: dict[Name, PoolConfig] = {}
    """Pools beside `main`. One is opened only where a role of the recipe sits in it."""
    roles: dict[Name, Name] = {}
    """Pool of each role: actor, reference, critic, reward, or an annotator's name."""
    creation_deadline_seconds: Annotated[float, Field(gt=0)] = 10.0
    """How long Ray may take to reserve the devices of all pools before the run stops with an error."""
    call_deadline_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """How long any call to a worker may take before the run stops with an error, which says where the silent workers stand."""

    @model_validator(mode="after")
    def _pools_exist(self) -> Self:
        if MAIN_POOL in self.pools:
            raise ValueError("pools.main: the main pool is described by ranks, device and cpus_per_rank beside pools; choose another name")
        unknown = [f"roles.{role}={pool}" for role, pool in self.roles.items() if pool != MAIN_POOL and pool not in self.pools]
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: there is no such pool; there are: {', '.join([MAIN_POOL, *self.pools])}")
        return self

    def pool_of(self, role: str) -> str:
        """Name of the pool that `role` sits in."""
        return self.roles.get(role, MAIN_POOL)

    def pool(self, name: str) -> PoolConfig:
        """Settings of the pool `name`."""
        return self if name == MAIN_POOL else self.pools[name]

    def ranks_of(self, role: str) -> int:
        """Processes that `role` runs in."""
        return self.pool(self.pool_of(role)).ranks

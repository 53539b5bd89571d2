"""Workers without a model, for what `engine/control` does to any worker."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from engine.batch import Batch
from engine.control.dispatch import Dispatch, register

# Workers cannot import test modules.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

LONGER_THAN_ANY_TEST_SECONDS = 3600
PATIENCE_SECONDS = 30


def wait_for(path: Path, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return path.exists()


class Sealed:
    """Can be pickled everywhere, and unpickled everywhere but in one process."""

    def __init__(self, forbidden_process: int) -> None:
        self.forbidden_process = forbidden_process

    def __reduce__(self) -> tuple[Any, ...]:
        return unseal, (self.forbidden_process,)


def unseal(forbidden_process: int) -> Sealed:
    if os.getpid() == forbidden_process:
        raise PermissionError("a sealed value came into the process that it must not pass")
    return Sealed(forbidden_process)


class LightWorker:
    def __init__(self, rank: int, world_size: int, greeting: str) -> None:
        self.rank, self.world_size, self.greeting = rank, world_size, greeting

    @register(Dispatch.ALL)
    def describe(self, value: Any, *, suffix: str = "") -> tuple[int, int, str, Any, str]:
        return self.rank, self.world_size, self.greeting, value, suffix

    @register(Dispatch.ALL)
    def process_id(self) -> int:
        return os.getpid()

    @register(Dispatch.DATA_PARALLEL)
    def tag(self, items: list[Any], factor: int = 1) -> list[tuple[int, Any]]:
        return [(self.rank, item * factor) for item in items]

    @register(Dispatch.DATA_PARALLEL)
    def tag_rows(self, batch: Batch) -> Batch:
        return batch.with_tensors(rank=torch.full((len(batch),), self.rank))

    @register(Dispatch.DATA_PARALLEL)
    def seal(self, items: list[int], forbidden_process: int) -> list[tuple[int, Sealed]]:
        return [(item, Sealed(forbidden_process)) for item in items]

    @register(Dispatch.DATA_PARALLEL)
    def count_sealed(self, items: list[tuple[int, Sealed]]) -> list[tuple[int, int]]:
        return [(self.rank, number) for number, sealed in items if isinstance(sealed, Sealed)]

    @register(Dispatch.DATA_PARALLEL)
    def meaningless(self, items: list[int]) -> int:
        return len(items)

    @register(Dispatch.ALL)
    def explode(self, rank: int, until: Path) -> None:
        """One rank raises; the others do not answer before `until` exists, and leave a file beside it when they lose patience."""
        if self.rank != rank and not wait_for(until, PATIENCE_SECONDS):
            until.with_suffix(".in_vain").touch()
        raise ArithmeticError("the sum does not come out")

    @register(Dispatch.DATA_PARALLEL)
    def explode_over(self, items: list[Any]) -> list[Any]:
        raise ArithmeticError("the sum does not come out")

    @register(Dispatch.ALL)
    def be_silent(self, rank: int, until: Path) -> None:
        """One rank does not answer."""
        if self.rank == rank:
            wait_for(until, LONGER_THAN_ANY_TEST_SECONDS)

    @register(Dispatch.ALL)
    def die(self, rank: int) -> None:
        """One rank's process is killed, the others never answer."""
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LONGER_THAN_ANY_TEST_SECONDS)

    @register(Dispatch.ALL)
    def exit_in_a_collective(self, rank: int, host: str, port: int) -> None:
        """One rank's process ends while the others wait for it inside gloo, which tells them that the connection is closed."""
        address = f"tcp://{host}:{port}"
        dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=self.world_size, timeout=timedelta(seconds=120))
        dist.all_reduce(torch.zeros(1))
        if self.rank == rank:
            os._exit(3)
        dist.all_reduce(torch.zeros(1))

    def unregistered(self) -> None:
        """Not for the controller."""

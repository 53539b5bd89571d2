"""Workers without a model, for what `engine/control` does to any worker."""

import importlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from engine.batch import Batch
from engine.control.dispatch import ALL, DATA_PARALLEL, EACH, METRICS, RANK_ZERO, register
from engine.control.mesh import Mesh
from engine.metrics import Mean, Statistics

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


class Arriving:
    """Becomes the number of the thread that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return threading.get_ident, ()


class Late:
    """Whoever unpickles it waits for a file."""

    def __init__(self, until: Path) -> None:
        self.until = until

    def __reduce__(self) -> tuple[Any, ...]:
        return wait_for, (self.until, LONGER_THAN_ANY_TEST_SECONDS)


class Backwards(type(DATA_PARALLEL)):  # type: ignore[misc]
    """A mode of one's own: the last part goes to the first rank."""

    def share(self, mesh: Mesh, rank: int) -> Any:
        return super().share(mesh, len(mesh.part) - 1 - rank)


class LightWorker:
    def __init__(self, rank: int, ranks: int, greeting: str) -> None:
        self.rank, self.ranks, self.greeting = rank, ranks, greeting
        self.heard: list[Any] = []

    def meshes(self) -> dict[str, Mesh]:
        """Pairs of ranks share a part, where they come in pairs."""
        return {"pairs": Mesh.grouped(self.ranks, 2 if self.ranks % 2 == 0 else 1)}

    @register(ALL)
    def describe(self, value: Any, *, suffix: str = "") -> tuple[int, int, str, Any, str]:
        return self.rank, self.ranks, self.greeting, value, suffix

    @register(DATA_PARALLEL, mesh="pairs")
    def tag_in_pairs(self, items: list[Any]) -> list[tuple[int, Any]]:
        return [(self.rank, item) for item in items]

    @register(Backwards())
    def tag_backwards(self, items: list[Any]) -> list[tuple[int, Any]]:
        return [(self.rank, item) for item in items]

    @register(RANK_ZERO)
    def first_alone(self, items: Any, *, suffix: str = "") -> Any:
        return [(self.rank, item) for item in items] if isinstance(items, list) else items

    @register(EACH)
    def one_each(self, items: Any, common: Any = None) -> tuple[int, Any, Any]:
        return self.rank, items, common

    @register(METRICS)
    def mean(self, batch: Batch) -> Statistics:
        return Statistics({"value": Mean.of(batch.tensors["value"].tolist())})

    @register(DATA_PARALLEL)
    def make(self, rows: list[int]) -> Batch:
        """Rows of different lengths, so that ranks pad differently."""
        width = max(rows, default=0)
        ids = torch.tensor([[row] * row + [0] * (width - row) for row in rows], dtype=torch.int64).view(len(rows), width)
        return Batch(tensors={"ids": ids, "value": torch.tensor(rows, dtype=torch.float64)}, objects={"name": [str(row) for row in rows]})

    @register(DATA_PARALLEL)
    def double(self, batch: Batch) -> Batch:
        return Batch(tensors={"double": batch.tensors["ids"] * 2})

    @register(DATA_PARALLEL)
    def subtract(self, batch: Batch) -> Batch:
        return Batch(tensors={"zero": batch.tensors["double"] - 2 * batch.tensors["ids"], "value": batch.tensors["value"]})

    @register(ALL)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(ALL, beside=True)
    def heard_so_far(self) -> list[Any]:
        return self.heard

    def hear(self, values: list[Any]) -> None:
        self.heard += values

    @register(ALL)
    def speak(self, outlet: Any, rows: int) -> None:
        if self.rank == 0:
            outlet.tell({row: row for row in range(rows)}, rows)

    @register(ALL)
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @register(ALL)
    def attribute(self, module: str, name: str) -> Any:
        return getattr(importlib.import_module(module), name)

    @register(ALL)
    def process_id(self) -> int:
        return os.getpid()

    @register(DATA_PARALLEL)
    def tag(self, items: list[Any], factor: int = 1) -> list[tuple[int, Any]]:
        return [(self.rank, item * factor) for item in items]

    @register(DATA_PARALLEL)
    def tag_rows(self, batch: Batch) -> Batch:
        return batch.with_tensors(rank=torch.full((len(batch),), self.rank))

    @register(DATA_PARALLEL)
    def seal(self, items: list[int], forbidden_process: int) -> list[tuple[int, Sealed]]:
        return [(item, Sealed(forbidden_process)) for item in items]

    @register(DATA_PARALLEL)
    def count_sealed(self, items: list[tuple[int, Sealed]]) -> list[tuple[int, int]]:
        return [(self.rank, number) for number, sealed in items if isinstance(sealed, Sealed)]

    @register(DATA_PARALLEL)
    def carry(self, items: list[Any]) -> list[Any]:
        return [Arriving() for _ in items]

    @register(DATA_PARALLEL)
    def threads(self, arrived_in: list[Any]) -> list[tuple[Any, int]]:
        return [(thread, threading.get_ident()) for thread in arrived_in]

    @register(DATA_PARALLEL, beside=True)
    def threads_beside(self, arrived_in: list[Any]) -> list[tuple[Any, int]]:
        return self.threads(arrived_in)

    @register(DATA_PARALLEL)
    def delay(self, items: list[Path]) -> list[Late]:
        return [Late(item) for item in items]

    @register(DATA_PARALLEL)
    def meaningless(self, items: list[int]) -> int:
        return len(items)

    @register(ALL)
    def explode(self, rank: int, until: Path) -> None:
        """One rank raises; the others do not answer before `until` exists, and leave a file beside it when they lose patience."""
        if self.rank != rank and not wait_for(until, PATIENCE_SECONDS):
            until.with_suffix(".in_vain").touch()
        raise ArithmeticError("the sum does not come out")

    @register(DATA_PARALLEL)
    def explode_over(self, items: list[Any]) -> list[Any]:
        raise ArithmeticError("the sum does not come out")

    @register(ALL)
    def be_silent(self, rank: int, until: Path) -> None:
        """One rank does not answer."""
        if self.rank == rank:
            wait_for(until, LONGER_THAN_ANY_TEST_SECONDS)

    @register(ALL)
    def die(self, rank: int) -> None:
        """One rank's process is killed, the others never answer."""
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LONGER_THAN_ANY_TEST_SECONDS)

    @register(ALL)
    def exit_in_a_collective(self, rank: int, host: str, port: int) -> None:
        """One rank's process ends while the others wait for it inside gloo, which tells them that the connection is closed."""
        address = f"tcp://{host}:{port}"
        dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=self.ranks, timeout=timedelta(seconds=120))
        dist.all_reduce(torch.zeros(1))
        if self.rank == rank:
            os._exit(3)
        dist.all_reduce(torch.zeros(1))

    def unregistered(self) -> None:
        """Not for the controller."""

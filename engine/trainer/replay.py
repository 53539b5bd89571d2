"""Runs one operator of a kept step again, alone, on the arguments that it had, and compares what comes out."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.batch import Batch
from engine.metrics import Statistics

if TYPE_CHECKING:
    from engine.trainer.session import Session

STATE = "state"
_KEPT = re.compile(r"(\d+)\.([a-z0-9_]+)\.([a-z0-9_]+)\.(\d+)\.pickle")


@dataclass(frozen=True, slots=True)
class KeptOperation:
    """One operator of a kept step."""

    number: int
    role: str
    operator: str
    files: Sequence[Path]
    """By rank."""

    def __str__(self) -> str:
        return f"{self.role}.{self.operator}"


@dataclass(frozen=True, slots=True)
class Difference:
    """How one column or metric of one rank's result differs from the kept one."""

    rank: int
    column: str
    largest: float
    """Largest absolute difference; inf where type or shape differ, or values that are no numbers."""


def step_directory(directory: Path, stage: str, step: int) -> Path:
    """Where a run keeps the calls of a step."""
    return directory / "calls" / stage / f"step_{step:06d}"


def kept_steps(directory: Path) -> list[tuple[str, int]]:
    """(stage, step) of every kept step of a run, in order."""
    found = [(path.parent.name, int(path.name.removeprefix("step_"))) for path in directory.glob("calls/*/step_*")]
    return sorted(found)


def kept_operations(directory: Path) -> list[KeptOperation]:
    """The operators of a kept step, in the order in which they were called."""
    found: dict[tuple[int, str, str], dict[int, Path]] = {}
    for path in directory.glob("*.pickle"):
        if matched := _KEPT.fullmatch(path.name):
            number, role, operator, rank = matched.groups()
            found.setdefault((int(number), role, operator), {})[int(rank)] = path
    return [KeptOperation(*key, [files[rank] for rank in sorted(files)]) for key, files in sorted(found.items())]


def replay(session: "Session", directory: Path, operation: KeptOperation) -> list[Difference]:
    """One operator again, on workers that hold the state with which the step began.

    The session's stage must have begun, and its prompts must be loaded. What the operator depends on beyond its arguments is the state at
    the step's beginning, so `update` is compared as the step's first update.
    """
    group = next((group for group in session.groups if group.role == operation.role), None)
    if group is None:
        raise ValueError(f"the configuration has no role {operation.role}; the kept step was made with another one")
    if len(operation.files) not in (1, group.ranks):
        raise ValueError(f"{directory}: {operation} was kept of {len(operation.files)} ranks, and {operation.role} has {group.ranks}")
    group.load_state(directory / STATE).get()
    if operation.operator == "generate":
        group.synchronise().get()
    return [difference for rank, (kept, found) in enumerate(group.replay(operation.files)) for difference in differences(rank, kept, found)]


def differences(rank: int, kept: Any, found: Any) -> Iterator[Difference]:
    """Column by column, metric by metric; those that are equal too."""
    before, after = _columns(kept), _columns(found)
    for name in dict.fromkeys([*before, *after]):
        yield Difference(rank, name, _distance(before.get(name), after.get(name)))


def _columns(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Batch):
        return {**value.tensors, **value.objects}
    if isinstance(value, Statistics):
        return value.result()
    return value if isinstance(value, dict) else {"result": value}


def _distance(one: Any, other: Any) -> float:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return float("inf")
        return float((one.double() - other.double()).abs().nan_to_num(nan=float("inf")).max()) if one.numel() and not torch.equal(one, other) else 0.0
    if type(one) is float and type(other) is float:
        return abs(one - other) if one != other else 0.0
    return 0.0 if type(one) is type(other) and one == other else float("inf")

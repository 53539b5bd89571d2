"""The dataflow of one step as it ran."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    rank: int
    started: float
    ended: float
    bytes_in: int
    bytes_out: int
    process: int
    node: str


@dataclass(frozen=True, slots=True)
class Operation:
    id: int
    role: str
    operator: str
    pool: str
    device: str
    spans: list[Span]
    result_bytes: int


@dataclass(frozen=True, slots=True)
class Edge:
    source: int
    target: int
    bytes: int
    label: str


@dataclass(frozen=True, slots=True)
class ControllerSpan:
    name: str
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class Trace:
    stage: str
    step: int
    operations: Sequence[Operation]
    edges: Sequence[Edge]
    controller: Sequence[ControllerSpan]
    controller_bytes: int
    batch_bytes: int

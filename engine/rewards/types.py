"""What a reward is asked about, and what becomes of it. Imports nothing heavy: the processes that run rewards start with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class Sample:
    """What a reward may be told of a response. A function takes the fields that its parameters name."""

    response: str
    """Decoded text, without special tokens."""
    ground_truth: str
    messages: tuple[dict[str, str], ...] = ()
    """Of the prompt, each with role and content."""
    data_source: str = ""
    response_tokens: int = 0
    """Tokens drawn, the end token included."""
    finished: bool = True
    """False where the token limit cut the response off."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A sample whose score is known."""

    sample: Sample
    score: float
    parameters: Mapping[str, Any] | None = None
    """Of the reward; None stands for those that the recipe gives it."""


@dataclass(frozen=True, slots=True)
class Function:
    """A reward with its parameters, as it goes to the processes."""

    name: str
    """Of the registry, or `module:function`."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    samples_at_once: int = 1
    """Largest number of samples that a process is given together; only of functions that are async or take batches."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a reward said of one sample."""

    status: Status
    score: float = 0.0
    """0 where the status is not ok: nobody knows it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of a function that gives a dict."""
    reason: str = ""
    """Why the status is not ok."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one call."""

    seconds: float
    memory_bytes: int
    """Beyond what the process has when the functions are loaded."""

"""The run's event log: what the engine and the tasks report, one JSON object a line, each complete by itself.

It is written before anything is sent to MLflow, so that nothing is lost when the tracker fails, and everything that MLflow shows, the plots
included, can be made from it again.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from engine import events
from tasks.accuracy import Accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """A run begins."""

    run: str
    recipe: str
    description: str
    configuration: Mapping[str, Any]
    """Resolved, as JSON values."""
    lineage: Mapping[str, Any]
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetUsed:
    """The run reads a split of a data set."""

    name: str
    digest: str
    rows: int
    context: str
    """`training`, `validation` or `test`."""
    source: str
    """File or name of the generator."""
    used_by: Sequence[str]
    """Names of the stages that read it, and `evaluation` for the evaluations: their runs show it too."""
    md5: str = ""
    """Of the file, which is what DVC knows it by; empty where there is no file."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Type of each column, as Arrow names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelUsed:
    """The run starts from the weights in a directory."""

    directory: str
    digest: str
    """SHA-256 over its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSaved:
    """A stage's weights lie in a directory."""

    stage: str
    step: int
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReused:
    """What a stage leaves lay ready, made from the same by another run."""

    stage: str
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFinished:
    """Some weights were evaluated."""

    label: str
    stage: str | None
    """The stage that made the weights; None for the weights that the recipe starts from."""
    trained_steps: int
    """Steps of all stages before."""
    accuracy: Accuracy
    seconds: float
    tokens: int
    rows: Sequence[Mapping[str, Any]]
    """Some of the samples; keys as in `SamplesGenerated`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSaved:
    """A plot or a trace lies in a file."""

    stage: str | None
    """None for what is about the whole run."""
    file: str
    folder: str
    """Where MLflow shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """The run ends."""

    status: Literal["FINISHED", "FAILED"]
    reason: str | None
    summary: Mapping[str, Any]
    lineage: Mapping[str, Any]
    note: str
    """Markdown."""


LoggedEvent = events.Event | RunStarted | DatasetUsed | BaseModelUsed | StageReused | ModelSaved | EvaluationFinished | FileSaved | RunFinished

_TYPES: dict[str, TypeAdapter[LoggedEvent]] = {
    kind.__name__: TypeAdapter(kind)
    for kind in (
        events.StageStarted,
        events.StepFinished,
        events.UpdatesSkipped,
        events.SamplesGenerated,
        events.WeightsSynchronised,
        events.EvaluationProgressed,
        events.StageFinished,
        RunStarted,
        DatasetUsed,
        BaseModelUsed,
        StageReused,
        ModelSaved,
        EvaluationFinished,
        FileSaved,
        RunFinished,
    )
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the log."""

    time_ms: int
    """Unix time, milliseconds."""
    event: LoggedEvent
    end: int
    """Byte offset of the next line."""


def append(path: Path, event: LoggedEvent, time_ms: int) -> None:
    """Write one event at the end of the log, in one piece.

    Raises:
        OSError: the disk is full or the file is not writable; names the path.
    """
    line = json.dumps({"type": type(event).__name__, "time_ms": time_ms, **_plain(dataclasses.asdict(event))}, allow_nan=False)
    try:
        with path.open("ab", buffering=0) as file:
            file.write(line.encode() + b"\n")
    except OSError as error:
        message = f"cannot write the run's event log ({error.strerror}); free disk space or mend its permissions"
        raise type(error)(error.errno, message, str(path)) from error


def read(path: Path, start: int = 0) -> Iterator[Entry]:
    """The events from byte `start` on. A last line without its end, left by a killed process, is not an event.

    Raises:
        ValueError: a line is not an event that this version knows; names file and line.
    """
    with path.open("rb") as file:
        file.seek(start)
        end = start
        for line in file:
            if not line.endswith(b"\n"):
                return
            begin, end = end, end + len(line)
            yield _parse(line, path, begin, end)


def read_events(path: Path) -> list[LoggedEvent]:
    """All events of a log, in the order in which they happened; see `read`."""
    return [entry.event for entry in read(path)]


def _parse(line: bytes, path: Path, begin: int, end: int) -> Entry:
    try:
        fields = json.loads(line)
        kind, time_ms = fields.pop("type"), fields.pop("time_ms")
        return Entry(time_ms, _TYPES[kind].validate_python(fields), end)
    except (json.JSONDecodeError, AttributeError, KeyError, ValidationError) as error:
        number = path.read_bytes()[:begin].count(b"\n") + 1
        raise ValueError(f"{path}, line {number}: not an event this version can read ({error})") from error


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as strings, which `float` and pydantic turn back into numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

"""What a run will do, in order, and where it is: for whoever watches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.events import Event
from engine.hardware import resolve_device, resolve_dtype
from tasks.config import RecipeConfig
from tasks.stage_config import BASE as BASE
from tasks.stage_config import kind_of

START_PREFECT = "start Prefect"
CREATE_MODEL = "create model"
PREPARE_DATA = "prepare data"
VALIDATE_DATA = "validate data"
START_ENGINE = "start engine"
FINISH = "plots, records"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted:
    """A part of the run begins that has no steps, or whose steps are told in other events."""

    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFinished:
    """It is done."""

    phase: str
    result: str = ""
    """What came out, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that the person at the terminal should know, though the run goes on."""

    text: str


Report = Event | PhaseStarted | PhaseFinished | Notice
Listener = Callable[[Report], None]


@contextmanager
def told(listener: Listener, phase: str) -> Iterator[list[str]]:
    """Tells `listener` that a phase begins and ends. What the body appends to the list is told as its result."""
    result: list[str] = []
    listener(PhaseStarted(phase=phase))
    yield result
    listener(PhaseFinished(phase=phase, result=", ".join(result)))


def evaluation_phase(label: str) -> str:
    """Phase of the evaluation `label`."""
    return f"evaluate {label}"


def planned_phases(config: RecipeConfig, stages: Sequence[str]) -> list[str]:
    """All phases of a run of these stages, in order; a stage is a phase with the stage's name."""
    validated = [] if config.data.quality == "off" else [VALIDATE_DATA]
    phases = [START_PREFECT, CREATE_MODEL, PREPARE_DATA, *validated, START_ENGINE, evaluation_phase(BASE)]
    for name in stages:
        phases += [name, evaluation_phase(name)] if kind_of(config.stages[name]).trains else [name]
    return [*phases, FINISH]


def devices(config: RecipeConfig) -> str:
    """Ranks, device and number type that the engine works with."""
    pool = config.resources.pool(config.resources.pool_of("actor"))
    device, ranks = resolve_device(pool.device), pool.ranks
    return f"{ranks} rank{'s' if ranks > 1 else ''}, {device}, {resolve_dtype(device, config.model.dtype)}"

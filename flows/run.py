"""`almanac run`, `almanac evaluate` and others: what stands around the flows when a person starts them from a terminal."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flows.display import Display
from flows.terminal import captured
from tasks import record, show, workspace
from tasks.compose import compose, split_recipe
from tasks.config import RecipeConfig
from tasks.preflight import Finding, preflight
from tasks.problems import ConfigurationError, Problem
from tasks.progress import (
    CREATE_MODEL,
    FINISH,
    PREPARE_DATA,
    START_ENGINE,
    START_PREFECT,
    Notice,
    PhaseFinished,
    PhaseStarted,
    evaluation_phase,
    planned_phases,
)
from tasks.run_lock import only_run
from tasks.stage import through

if TYPE_CHECKING:  # torch
    from engine.trainer.replay import Difference
    from tasks.accuracy import Accuracy
    from tasks.record import StageRecord

MODEL = "model"
"""Label of the evaluation of a model that no run is about."""
REPLAY = "replay"
TERMINATED = 128 + signal.SIGTERM


def checked(config: RecipeConfig) -> list[str]:
    """Looks at everything that can be known before a run. Returns what a person should be warned of.

    Raises:
        ConfigurationError: what would stop the run, here or anywhere.
    """
    findings = preflight(config)
    refuse(findings, "error", "missing")
    return [str(finding) for finding in findings]


def refuse(findings: Sequence[Finding], *levels: str) -> None:
    """Raises `ConfigurationError` with all findings of these levels, where there are any."""
    if problems := [Problem(finding.key, finding.text) for finding in findings if finding.level in levels]:
        raise ConfigurationError(problems)


def run(overrides: Sequence[str], *, fresh: bool = False, until: str | None = None) -> None:
    """A recipe, with one display on the terminal and a table at the end. Returns only when the last planned step is done.

    With `fresh` everything is made anew; else stages that lie ready, made from the same, are taken as they are. `until` names the stage that it ends
    with; without it, that is the last one.

    Raises:
        ConfigurationError: what would stop the run.
        ValueError: there is no such stage.
    """
    config = compose(overrides)
    phases = planned_phases(config, through(config, until))
    warnings = checked(config)
    run_id = record.new_run_id(config.name)
    with only_run(run_id), observed(workspace.run_directory(run_id) / "almanac.log", run_id, phases) as display:
        for warning in warnings:
            display.show(Notice(text=warning))
        display.show(PhaseStarted(phase=START_PREFECT))
        # Ten seconds of imports, which the display is there before, and the server starts beside.
        from flows.prefect_server import start_server

        server = start_server()
        from flows.recipe import recipe
        from flows.watch import watched
        from tasks import stages  # noqa: F401 - torch, which the flow's first unit would import

        server.wait()
        display.show(PhaseFinished(phase=START_PREFECT, result="temporary server" if server.process else server.api))
        name, others = split_recipe(overrides)
        with watched(run_id, display.show):
            recipe(name, tuple(others), fresh, until)
        display.close(show.table(record.load(run_id)))


def evaluate(model: str, overrides: Sequence[str]) -> "tuple[RecipeConfig, Accuracy]":
    """Accuracy of a Hugging Face model (directory or hub name) on the test set of a recipe.

    The display is drawn on standard error: standard output is for the result.

    Raises:
        ConfigurationError: there is no such model, or the recipe is wrong.
    """
    config = _with_model(compose(overrides), model)
    warnings = checked(config)
    logs = workspace.work_directory() / "evaluate"
    phases = [CREATE_MODEL, PREPARE_DATA, START_ENGINE, evaluation_phase(MODEL)]
    with observed(logs / "almanac.log", f"{model} on the test set of {config.name}", phases, descriptor=2) as display:
        for warning in warnings:
            display.show(Notice(text=warning))
        from tasks.stages import evaluate_model

        return config, evaluate_model(config, MODEL, logs, display.show)


def asked(model: str, overrides: Sequence[str], kind: str, stage: str | None = None) -> "tuple[RecipeConfig, StageRecord]":
    """A recipe's stage of a kind that asks (difficulty, temperature_search), by a Hugging Face model: a directory or a hub name.

    The display is drawn on standard error: standard output is for the result.

    Raises:
        ConfigurationError: there is no such model, or the recipe is wrong.
        ValueError: the recipe has no such stage.
    """
    from tasks.stage import of_first_weights, with_stage

    config, name = with_stage(_with_model(compose(overrides), model), kind, stage)
    warnings, run_id = checked(config), record.new_run_id(config.name)
    log, phases = workspace.run_directory(run_id) / "almanac.log", [CREATE_MODEL, PREPARE_DATA, START_ENGINE, name, FINISH]
    with only_run(run_id), observed(log, f"{model} on the training prompts of {config.name}", phases, descriptor=2) as display:
        for warning in warnings:
            display.show(Notice(text=warning))
        return config, of_first_weights(config, name, run_id, display.show)


def _with_model(recipe: RecipeConfig, model: str) -> RecipeConfig:
    """The recipe, starting from another model: a directory or a hub name."""
    path = str(Path(model).expanduser().resolve()) if Path(model).expanduser().exists() else model
    return RecipeConfig.model_validate(recipe.model_dump() | {"model": {"path": path, "dtype": recipe.model.dtype}})


def replay(run: str, operator: str, step: int, stage: str | None) -> "tuple[str, str, Sequence[Difference]]":
    """One operator of a recorded step, run again. Returns the run's id, the stage, and how every column differs.

    The display is drawn on standard error: standard output is for the result.

    Raises:
        ValueError: there is no such run, or the call was not kept.
    """
    from tasks import replaying

    found = record.load(run)
    name, operation = replaying.find(found, operator, step, stage)
    logs = workspace.work_directory() / "replay"
    with observed(logs / "almanac.log", f"{operator} of {found.run}, step {step}", [REPLAY], descriptor=2) as display:
        display.show(PhaseStarted(phase=REPLAY))
        differences = replaying.run_again(found, name, step, operation, logs)
        display.show(PhaseFinished(phase=REPLAY, result=f"{len(differences)} columns"))
    return found.run, name, differences


@contextmanager
def observed(log: Path, title: str, phases: Sequence[str], *, descriptor: int = 1) -> Iterator[Display]:
    """A display, and everything else in the log file. What goes wrong is there with its traceback; the error carries the file's name."""
    with captured(log, descriptor) as console, terminable(), Display(console, title, phases, _shown(log)) as display:
        try:
            yield display
        except BaseException as error:
            # A full disk may be what went wrong.
            with suppress(OSError):
                traceback.print_exc()
            error.add_note(f"log: {_shown(log)}")
            raise


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM, too, ends a run in order: records say how far it came, and Ray's processes go with it."""

    def end(signal_number: int, frame: Any) -> NoReturn:
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit as error:
        # Ray puts a handler of its own in the place of ours, with another exit code.
        raise SystemExit(TERMINATED) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _shown(path: Path) -> str:
    """Relative to the working directory where that is shorter."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative

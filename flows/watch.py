"""Who watches a run, and the run that flows are part of.

A person at a terminal has a display, and has done what stands before a run (`flows/run.py`). A worker has neither: the flow then waits for its turn,
checks the recipe, writes the same log file, and tells Prefect's log what it would show. Flows take nothing but names and numbers; what they share
is found here.
"""

import io
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from prefect import get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.utilities.timeout import timeout
from rich.console import Console

from flows import artifacts
from flows.display import Display
from flows.run import TERMINATED, checked, terminable
from flows.terminal import captured
from tasks import record, show, workspace
from tasks.compose import compose
from tasks.config import RecipeConfig
from tasks.progress import Listener, Notice, planned_phases
from tasks.run_lock import RunInProgressError, only_run

if TYPE_CHECKING:  # torch
    from tasks.context import RunContext

LOG_WIDTH = 1000
"""Columns: Prefect's pages wrap lines themselves."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """Somebody at a terminal."""

    name: str
    """Of the run, or of the night: no other has it."""
    listener: Listener


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
_context: "ContextVar[RunContext | None]" = ContextVar("context", default=None)


class OutOfTimeError(TimeoutError):
    """A run took longer than it may."""


@contextmanager
def watched(name: str, listener: Listener) -> Iterator[None]:
    """Flows that the block calls are the run, or the night, `name`, and tell `listener` about progress."""
    token = _watcher.set(Watcher(name, listener))
    try:
        yield
    finally:
        _watcher.reset(token)


def watcher() -> Watcher | None:
    """Who watches; None in a worker."""
    return _watcher.get()


def current() -> "RunContext":
    """The run that tasks work on."""
    context = _context.get()
    assert context is not None, "called outside of a flow"
    return context


@contextmanager
def run_of(
    recipe: str,
    overrides: Sequence[str],
    *,
    about: Callable[[RecipeConfig], Sequence[str]] = lambda config: list(config.stages),
    fresh: bool = False,
    timeout_seconds: float | None = None,
) -> "Iterator[RunContext]":
    """The run of a flow, which ends with the block.

    Args:
        recipe: file in conf/recipe.
        overrides: beside it.
        about: the stages that the run is about.
        fresh: everything is made anew, whatever lies ready.
        timeout_seconds: how long the run may take, once it is its turn.

    Raises:
        ConfigurationError: what would stop the run.
        OutOfTimeError: it has taken as long as it may.
    """
    config = compose([f"recipe={recipe}", *overrides])
    stages = about(config)
    with ExitStack() as stack:
        who = _watcher.get() or stack.enter_context(_unwatched(config, stages))
        from tasks.context import open_run  # torch

        flow_run = runtime.flow_run.id
        _name(flow_run, who.name)
        progress = artifacts.Progress(who.listener, artifacts.Bars(config.name))
        context = stack.enter_context(open_run(config, who.name, progress, fresh=fresh, stages=stages, flow_run=flow_run))
        stack.callback(_context.reset, _context.set(context))
        artifacts.link(context.record)
        stack.enter_context(_limited(timeout_seconds))
        yield context


@contextmanager
def unwatched(name: str, log: Path, phases: Sequence[str]) -> Iterator[Display]:
    """As `flows.run.observed`, in a worker: what libraries print goes to the log file, and Prefect's log has what a terminal would show."""
    console = Console(file=_Lines(get_run_logger().info), width=LOG_WIDTH, highlight=False)
    try:
        with captured(log), terminable(), Display(console, name, phases, str(log)) as display:
            yield display
    except SystemExit as error:
        # Ray's handler and ours end a process in this way; Prefect knows a cancelled run by another.
        raise TerminationSignal(signal.SIGTERM) from error


@contextmanager
def in_turn(name: str, *, keep: bool = True) -> Iterator[None]:
    """Waits until no other run is on, and then is the one; with `keep=False` only waits."""
    with ExitStack() as stack:
        try:
            stack.enter_context(only_run(name))
        except RunInProgressError as error:
            get_run_logger().info("%s: this one waits until then", error)
            stack.enter_context(only_run(name, wait=True))
        if not keep:
            stack.close()
        yield


@contextmanager
def _unwatched(config: RecipeConfig, stages: Sequence[str]) -> Iterator[Watcher]:
    workspace.quiet_environment()
    run = record.new_run_id(config.name)
    log = workspace.run_directory(run) / "almanac.log"
    with in_turn(run), unwatched(run, log, planned_phases(config, stages)) as display:
        for warning in checked(config):
            display.show(Notice(text=warning))
        yield Watcher(run, display.show)
        display.close(show.table(record.load(run)))


@contextmanager
def _limited(seconds: float | None) -> Iterator[None]:
    try:
        with timeout(seconds, timeout_exc_type=OutOfTimeError):
            yield
    except OutOfTimeError:
        raise OutOfTimeError(f"stopped after {seconds:g} s (timeout_seconds)") from None
    except TerminationSignal as error:
        # Prefect's word for what the record knows as this one.
        raise SystemExit(TERMINATED) from error


def _name(flow_run: str | None, name: str) -> None:
    """The flow run is called as the run is; each attempt is a run of its own."""
    if flow_run is not None:
        with artifacts.best_effort(), get_client(sync_client=True) as client:
            client.update_flow_run(UUID(flow_run), name=name)


class _Lines(io.StringIO):
    """A file whose lines go to a logger."""

    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__()
        self._log, self._rest = log, ""

    def write(self, text: str) -> int:
        """Lines that are whole are logged."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                self._log(line.rstrip())
        return len(text)

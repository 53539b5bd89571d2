"""From the run's event log into MLflow: by a thread, so that no step waits for a database or a server."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from mlflow.exceptions import MlflowException
from requests import RequestException
from sqlalchemy.exc import SQLAlchemyError

from engine.events import StepFinished
from tasks import journal
from tasks.journal import Entry, LoggedEvent, RunStarted
from tasks.mlflow_writer import MLflowWriter
from tasks.record import MLflowReference

logger = logging.getLogger(__name__)

REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"}
"""MLflow's answers that will not change when one asks again."""
PAUSE_FACTOR = 20
"""After a failed attempt that took a second, the next one waits for 20: who is away for long is not asked all the time."""
GATHER_SECONDS = 1.0
"""What happens within so many is sent together: steps may take a tenth of a second, and every transaction waits for the disk."""
MOST_METRICS = 1000
"""That MLflow takes in one request."""


class Delivery:
    """Sends what the log holds from now on, in its order. MLflow may fail for a while: then everything waits in the log, and is sent later.

    `begin` it, `wake` it after every event, and `end` it.

    Args:
        events_file: the log; need not be there yet.
        writer: makes MLflow show an entry.
    """

    def __init__(self, events_file: Path, writer: MLflowWriter) -> None:
        self._events_file, self._writer = events_file, writer
        self._cursor = events_file.stat().st_size if events_file.exists() else 0
        self._next_attempt = 0.0
        self._failure: str | None = None
        self._refused: list[str] = []
        self._fault: Exception | None = None
        self._news, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="delivery", daemon=True)

    @property
    def reference(self) -> MLflowReference | None:
        """The run in MLflow, as soon as it is there."""
        return self._writer.reference

    @property
    def complaint(self) -> str | None:
        """One sentence for people where MLflow lacks something, else None."""
        waiting = sum(1 for _ in journal.read(self._events_file, self._cursor))
        failure = self._failure if waiting else None
        if failure is None and not self._refused:
            return None
        lacking = (waiting if failure else 0) + len(self._refused)
        return f"{lacking} records are not in MLflow ({self._writer.uri}): {failure or self._refused[0]}. All are in {self._events_file}"

    def begin(self) -> None:
        """Sends what is there, once, before it returns.

        Raises:
            ValueError: MLflow answers, but refuses the run, as when its experiment was deleted.
        """
        self._send()
        if self._refused and self.reference is None:
            raise ValueError(self._refused[0])
        self._thread.start()

    def wake(self) -> None:
        """There is something to send.

        Raises:
            Exception: what was sent before has shown a fault of ours.
        """
        if self._fault is not None:
            raise self._fault
        self._news.set()

    def end(self) -> None:
        """Sends all that is left; where MLflow fails, tries only once."""
        self._ending.set()
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._send()

    def _run(self) -> None:
        while True:
            self._news.wait()
            self._ending.wait(max(GATHER_SECONDS, self._next_attempt - time.monotonic()))
            if self._ending.is_set():
                return
            self._news.clear()
            try:
                self._send()
            except Exception as error:  # noqa: BLE001 - raised again where the run hears it
                self._fault = error
                return

    def _send(self) -> None:
        """A refused entry is counted and passed over; any other failure ends the attempt."""
        for entries in together(journal.read(self._events_file, self._cursor)):
            if not self._sent(entries):
                self._news.set()
                return
        self._failure = None

    def _sent(self, entries: list[Entry]) -> bool:
        """Whether there is nothing left to do about them."""
        started = time.monotonic()
        try:
            self._writer.write(entries)
        except (MlflowException, RequestException, SQLAlchemyError, OSError) as error:
            if not _is_refusal(error, entries[0].event, starting=self.reference is None and bool(self._failure)):
                self._wait(error, time.monotonic() - started)
                return False
            if len(entries) > 1:
                # Only one of them may be at fault.
                return all(self._sent([entry]) for entry in entries)
            self._refused.append(_first_line(error))
            logger.warning("MLflow refused a record of type %s: %s", type(entries[0].event).__name__, error)
        self._cursor = entries[-1].end
        return True

    def _wait(self, error: Exception, took: float) -> None:
        if self._failure is None:
            logger.warning("MLflow (%s) fails; records go to %s until it is back: %s", self._writer.uri, self._events_file, error)
        self._failure = _first_line(error)
        self._next_attempt = time.monotonic() + max(1.0, PAUSE_FACTOR * took)


def together(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """In their order: steps of one stage that follow each other, as many as MLflow takes at once; all others one by one."""
    steps: list[Entry] = []
    stage, metrics = "", 0
    for entry in entries:
        event = entry.event
        count = len(event.metrics) + 1 if isinstance(event, StepFinished) else 0
        if steps and (not isinstance(event, StepFinished) or event.stage != stage or metrics + count > MOST_METRICS):
            yield steps
            steps, metrics = [], 0
        if isinstance(event, StepFinished):
            stage, metrics = event.stage, metrics + count
            steps.append(entry)
        else:
            yield [entry]
    if steps:
        yield steps


def _is_refusal(error: Exception, event: LoggedEvent, *, starting: bool) -> bool:
    """Whether asking again is useless: MLflow says no, or a file of ours cannot be read or copied.

    A run that could not be started at first goes on, and so must its `RunStarted`: everything after needs it.
    """
    if isinstance(event, RunStarted) and starting:
        return False
    if isinstance(error, MlflowException):
        return error.error_code in REFUSALS
    return isinstance(error, OSError) and not isinstance(error, RequestException)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

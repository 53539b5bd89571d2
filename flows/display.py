"""What a person sees of a run: a line for each phase, planned ones included, with progress, time left and the number that matters."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from engine.events import EvaluationProgressed, StageFinished, StageStarted, StepFinished, UpdatesSkipped
from tasks.progress import Notice, PhaseFinished, PhaseStarted, Report, evaluation_phase

KEY_METRICS = {"sft/loss": "loss {:.3f}", "reward/mean": "reward {:.3f}", "response/tokens_mean": "{:.1f} tokens"}
"""Metrics shown beside the bar, where a step has them."""
PLAIN_REPORTS = 10
"""Lines that a phase with many steps prints where there is no terminal."""
BAR_WIDTH = 14
MARKS = {"planned": Text("·", "dim"), "running": Text("●", "cyan"), "done": Text("✓", "green"), "broken": Text("✗", "red")}


@dataclass
class Line:
    """One phase of the run."""

    phase: str
    state: str = "planned"
    done: int = 0
    total: int | None = None
    """Steps or samples; None where nothing is counted."""
    note: str = ""
    started: float = 0.0
    ended: float = 0.0
    first: tuple[float, int] | None = None
    """When the first steps were done, and how many; they take longer than the others, and what is left is estimated without them."""
    last: float = 0.0
    """When the newest step was done."""
    reports: int = 0
    """Plain lines printed so far."""

    def advance(self, done: int, now: float) -> None:
        """So many steps are done."""
        self.done, self.last = done, now
        if self.first is None:
            self.first = (now, done)

    def seconds_left(self, now: float) -> float | None:
        """Estimated from the steps so far; None before there are enough."""
        if self.total is None or self.first is None or self.done <= self.first[1]:
            return None
        begin, done = self.first
        return max(0.0, (self.last - begin) / (self.done - done) * (self.total - self.done) - (now - self.last))


class Display:
    """Takes events from any thread. A context manager: shows itself on entry, and stays on the screen as it was at the end.

    On a terminal it is one picture that changes in place; elsewhere (pipe, file, CI) plain lines, one now and then.

    Args:
        console: where to draw.
        title: first line, such as the run's id.
        phases: what is planned, in order.
        log_file: named under the picture.
        clock: gives seconds.
    """

    def __init__(self, console: Console, title: str, phases: Sequence[str], log_file: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._lines = {phase: Line(phase) for phase in phases}
        self._title, self._log = Text(title, style="bold"), Text(f"log: {log_file}", style="dim", overflow="fold")
        # The thread that redraws, and those that report.
        self._lock = RLock()
        # Left to itself, rich would bring everything that Python prints back to the terminal.
        self._live = Live(get_renderable=self.picture, console=console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        else:
            self._console.print(self._title)
            self._console.print(self._log)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop(kind)

    def _stop(self, kind: type[BaseException] | None) -> None:
        with self._lock:
            for line in self._lines.values():
                if line.state == "running":
                    line.state, line.ended = "broken" if kind else "done", self._clock()
        # Without the lock: it waits for the thread that redraws.
        if self._console.is_terminal:
            self._live.stop()

    def show(self, event: Report) -> None:
        """Shows what an event says; one that says nothing about progress is left out."""
        if isinstance(event, Notice | UpdatesSkipped):
            # Above the picture, where it stays. Without our lock: printing waits for the thread that redraws, and that one for our lock.
            self._console.print(Text(event.text if isinstance(event, Notice) else _skipped(event), "yellow"))
            return
        with self._lock:
            match event:
                case PhaseStarted(phase=phase):
                    self._start(phase, None)
                case StageStarted(stage=phase, steps=steps):
                    self._start(phase, steps)
                case StepFinished(stage=phase, step=step, metrics=metrics):
                    shown = [form.format(metrics[name]) for name, form in KEY_METRICS.items() if name in metrics]
                    self._advance(self._lines[phase], step, "  ".join(shown))
                case EvaluationProgressed(label=label, done=done, total=total):
                    line = self._lines[evaluation_phase(label)]
                    line.total = total
                    self._advance(line, done, "")
                case PhaseFinished(phase=phase, result=result):
                    self._finish(self._lines[phase], result)
                case StageFinished(stage=phase, ended_by=ended_by):
                    self._finish(self._lines[phase], "converged" if ended_by == "convergence" else None)

    def close(self, summary: RenderableType) -> None:
        """All is done; `summary` goes below the picture."""
        self._stop(None)
        self._console.print("", summary, sep="\n")

    def picture(self) -> RenderableType:
        """The whole display as it is now."""
        table = Table.grid(padding=(0, 1, 0, 0))
        for justify in ("left", "left", "left", "right", "right"):
            table.add_column(justify=justify, no_wrap=True)
        table.add_column(overflow="fold")
        with self._lock:
            now = self._clock()
            for line in self._lines.values():
                style = "dim" if line.state == "planned" else ""
                count = f"{line.done}/{line.total}" if line.total else ""
                table.add_row(MARKS[line.state], Text(line.phase, style), _bar(line), count, _time(line, now), line.note)
        return Group(self._title, table, self._log)

    def _start(self, phase: str, steps: int | None) -> None:
        line = self._lines.setdefault(phase, Line(phase))
        line.state, line.total, line.started = "running", steps, self._clock()
        self._plain(f"{phase}: started")

    def _advance(self, line: Line, done: int, note: str) -> None:
        line.advance(done, self._clock())
        line.note = note
        reports = done * PLAIN_REPORTS // line.total if line.total else 0
        if reports > line.reports:
            line.reports = reports
            self._plain(f"{line.phase}: {done}/{line.total}  {note}".rstrip())

    def _finish(self, line: Line, result: str | None) -> None:
        """The last step's note stays where there is no result."""
        line.state, line.ended = "done", self._clock()
        line.note = line.note if result is None else result
        self._plain(f"{line.phase}: done in {duration(line.ended - line.started)}  {result or ''}".rstrip())

    def _plain(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(text, markup=False)


def _skipped(event: UpdatesSkipped) -> str:
    updates = f"{event.updates} update{'s' if event.updates > 1 else ''} of the {event.trained}"
    return f"{event.stage}, step {event.step}: {updates} skipped, the gradient was not finite; the batch is kept in {event.directory}"


def duration(seconds: float) -> str:
    """Minutes and seconds, as in 3:07; hours before them where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _bar(line: Line) -> RenderableType:
    if line.state == "planned" or (line.total is None and line.state != "running"):
        return ""
    return ProgressBar(total=line.total, completed=line.done, width=BAR_WIDTH)


def _time(line: Line, now: float) -> str:
    if line.state == "planned":
        return ""
    if line.state != "running":
        return duration(line.ended - line.started)
    left = line.seconds_left(now)
    return duration(now - line.started) if left is None else f"{duration(left)} left"

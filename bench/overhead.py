"""What Prefect, MLflow, DVC, validation and the run's page add to the main job, as a share of its seconds.

    python bench/overhead.py [key=value ...]

Runs the main job once, everything anew, with a clock at the edges of each: what runs inside another one counts for the inner one alone, so that the
shares add up to the run. Writes docs/results/overhead.{json,md}; exits with 1 when all of them together take more than 3 %.

Those are the seconds in which the run does nothing else. What works beside it (Prefect's server, the threads of MLflow and validation,
`dvc commit`) may take a core from it: its processor seconds are told, too.
"""

import functools
import resource
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
from report import commit, table, write

if TYPE_CHECKING:
    from flows.prefect_server import Server

MOST = 0.03
"""Share of the run that all of them together may take."""
JOB = "the job itself"
ABOUT = {
    "Prefect": "imports, the start of its server, flow and task runs, artifacts",
    "MLflow": "imports, the database, metrics, parameters, artifacts, checkpoints",
    "DVC": "links to outputs, metrics, `dvc commit`",
    "validation": "pandera and Great Expectations",
    "pictures and page": "plots and report.html",
}


class Clock:
    """Seconds of the main thread by what it is in, the innermost alone; other threads are not looked at."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.beside: dict[str, float] = defaultdict(float)
        """Processor seconds of other threads and of processes."""
        self._inside = [JOB]
        self._since = time.perf_counter()

    @contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """The block is part of `what`; in another thread, its processor seconds are."""
        if threading.current_thread() is not threading.main_thread():
            begun = time.thread_time()
            yield
            self.beside[what] += time.thread_time() - begun
            return
        self._turn()
        self._inside.append(what)
        try:
            yield
        finally:
            self._turn()
            self._inside.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        self.seconds[self._inside[-1]] += now - self._since
        self._since = now

    def total(self) -> float:
        """Seconds up to now."""
        self._turn()
        return sum(self.seconds.values())

    def processes(self, owner: Any, name: str, what: str) -> None:
        """Of processes that calls of a method wait for, the processor seconds are beside the run from now on."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def counted(*arguments: Any, **named: Any) -> Any:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            try:
                return inner(*arguments, **named)
            finally:
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                self.beside[what] += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        setattr(owner, name, counted)

    def around(self, owner: Any, name: str, what: str) -> None:
        """Calls of a function, or of a method of a class, are part of `what` from now on."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*arguments: Any, **named: Any) -> Any:
            with self.inside(what):
                return inner(*arguments, **named)

        setattr(owner, name, timed)


def main(arguments: Sequence[str]) -> int:
    """Runs the job and writes the results. Returns the exit code."""
    from flows.commands import DEFAULT_RECIPE
    from tasks import workspace
    from tasks.compose import compose

    workspace.quiet_environment()
    overrides = list(arguments) if any(argument.startswith("recipe=") for argument in arguments) else [f"recipe={DEFAULT_RECIPE}", *arguments]
    # The verdict on the same data is taken even by a fresh run.
    shutil.rmtree(workspace.quality_directory(compose(overrides).name), ignore_errors=True)
    clock = Clock()
    server = put_edges(clock)
    from flows import run

    run.run(overrides, fresh=True)
    seconds = clock.total()
    if server.process is not None:
        times = psutil.Process(server.process.pid).cpu_times()
        clock.beside["Prefect"] += times.user + times.system
    shares = {what: clock.seconds[what] / seconds for what in ABOUT}
    by, beside = dict(clock.seconds), dict(clock.beside)
    results = {"commit": commit(), "overrides": overrides, "seconds": seconds, "by": by, "shares": shares, "beside": beside}
    write("overhead", results, document(results))
    return 0 if sum(shares.values()) <= MOST else 1


def put_edges(clock: Clock) -> "Server":
    """From now on the clock sees when the job is left, and for what. Returns Prefect's server, started as by `almanac run`."""
    with clock.inside("Prefect"):
        from flows import prefect_server

        server = prefect_server.start_server()
        from prefect import Flow, Task
        from prefect.futures import PrefectConcurrentFuture

        from flows import recipe, units
    with clock.inside("MLflow"):
        from tasks.delivery import Delivery
        from tasks.tracking import Tracker
    from tasks import publishing, stages  # noqa: F401 - torch

    with clock.inside("Prefect"):
        server.wait()
    for runs in (Flow, Task):
        clock.around(runs, "__call__", "Prefect")
    clock.around(Task, "submit", "Prefect")
    for body in [recipe.recipe, units.create_model, units.prepare_data, units.start_engine, units.evaluate, units.run_stage]:
        # What Prefect calls is the job again.
        clock.around(body, "fn", JOB)
    # It runs while the engine starts; what is waited for at the end is seen.
    clock.around(units.validate_data, "fn", "validation")
    clock.processes(units.validate_data, "fn", "validation")
    clock.around(PrefectConcurrentFuture, "result", "validation")
    for name in ("__enter__", "__exit__", "_log"):
        clock.around(Tracker, name, "MLflow")
    clock.around(Delivery, "_run", "MLflow")
    for name in ("_draw", "_report"):
        clock.around(Tracker, name, "pictures and page")
    for name in ("data", "validation", "stage", "evaluation", "lay_out", "close"):
        clock.around(publishing.Publication, name, "DVC")
    clock.around(publishing.Commit, "wait", "DVC")
    clock.processes(publishing.Commit, "wait", "DVC")
    return server


def document(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    seconds, by, beside = results["seconds"], results["by"], results["beside"]
    rows = [
        [what, about, f"{by.get(what, 0.0):.1f}", f"{100 * results['shares'][what]:.2f}", f"{beside.get(what, 0.0):.1f}"]
        for what, about in ABOUT.items()
    ]
    together = sum(results["shares"].values())
    rows.append(["together", "", f"{together * seconds:.1f}", f"{100 * together:.2f}", f"{sum(beside.values()):.1f}"])
    rows.append(["the run", " ".join(results["overrides"]), f"{seconds:.0f}", "100", ""])
    return "\n".join(
        [
            "# What the tools around the engine add",
            "",
            f"`python bench/overhead.py`, commit {results['commit']}. Seconds of the run's main thread by what it is in, the innermost alone;",
            f"at most {100 * MOST:.0f} % is wanted. The last column has processor seconds of threads and processes that work while the run goes on:",
            "on two cores that were always busy each would delay it by half a second, so half of that column is the most that is not seen.",
            "",
            table(["part", "what", "seconds", "% of the run", "processor seconds beside it"], rows, words=2),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

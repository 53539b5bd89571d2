"""What Prefect, MLflow, DVC, validation and the run's page add to the main job, as a share of its seconds.

    python bench/overhead.py [key=value ...]

Runs the main job once, everything anew, with a clock at the edges of each: what runs inside another one counts for the inner one alone, so that the
shares add up to the run. Writes docs/results/overhead.{json,md}; exits with 1 when all of them together take more than 3 %.

What it cannot see: seconds in which a process beside the run (Prefect's server) takes a core from it.
"""

import functools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from report import commit, table, write

MOST = 0.03
"""Share of the run that all of them together may take."""
LEAST = 1e-3
"""Share below which validation has found its verdict ready."""
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
        self._inside = [JOB]
        self._since = time.perf_counter()

    @contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """The block is part of `what`."""
        if threading.current_thread() is not threading.main_thread():
            yield
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

    workspace.quiet_environment()
    overrides = list(arguments) if any(argument.startswith("recipe=") for argument in arguments) else [f"recipe={DEFAULT_RECIPE}", *arguments]
    clock = Clock()
    put_edges(clock)
    from flows import run

    run.run(overrides, fresh=True)
    seconds = clock.total()
    shares = {what: clock.seconds[what] / seconds for what in ABOUT}
    results = {"commit": commit(), "overrides": overrides, "seconds": seconds, "by": dict(clock.seconds), "shares": shares}
    write("overhead", results, document(results))
    return 0 if sum(shares.values()) <= MOST else 1


def put_edges(clock: Clock) -> None:
    """From now on the clock sees when the job is left, and for what."""
    with clock.inside("Prefect"):
        from prefect import Flow, Task

        from flows import data, evaluation, prefect_server, recipe, stage, units
    with clock.inside("MLflow"):
        from tasks.tracking import Tracker
    from tasks import publishing, validate

    clock.around(prefect_server, "start_server", "Prefect")
    for runs in (Flow, Task):
        clock.around(runs, "__call__", "Prefect")
    flows = [recipe.recipe, data.data, evaluation.evaluation, *stage.FLOWS.values()]
    for body in [*flows, units.create_model, units.prepare_data, units.validate_data, units.evaluate, units.run_stage]:
        # What Prefect calls is the job again.
        clock.around(body, "fn", JOB)
    for name in ("__enter__", "__exit__", "_log"):
        clock.around(Tracker, name, "MLflow")
    for name in ("_draw", "_report"):
        clock.around(Tracker, name, "pictures and page")
    for name in ("data", "validation", "stage", "evaluation", "lay_out", "close"):
        clock.around(publishing.Publication, name, "DVC")
    clock.around(validate, "validate", "validation")


def document(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    seconds = results["seconds"]
    rows = [[what, about, f"{results['by'].get(what, 0.0):.1f}", f"{100 * results['shares'][what]:.2f}"] for what, about in ABOUT.items()]
    together = sum(results["shares"].values())
    rows.append(["together", "", f"{together * seconds:.1f}", f"{100 * together:.2f}"])
    rows.append(["the run", " ".join(results["overrides"]), f"{seconds:.0f}", "100"])
    lay_ready = "The verdict on the same data lay ready, so validation took nothing; it takes about five seconds where it does not."
    ready = [lay_ready, ""] if results["shares"]["validation"] < LEAST else []
    return "\n".join(
        [
            "# What the tools around the engine add",
            "",
            f"`python bench/overhead.py`, commit {results['commit']}. Seconds of the run's main thread by what it is in, the innermost alone;",
            f"at most {100 * MOST:.0f} % is wanted. What Prefect's server, a process of its own, takes from the two cores meanwhile is not in it.",
            "",
            table(["part", "what", "seconds", "% of the run"], rows, words=2),
            "",
            *ready,
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

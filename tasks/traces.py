"""The recorded dataflow of a run's steps: where it lies, and as what it can be looked at."""

from pathlib import Path

from engine.control import trace as formats
from engine.control.trace import Trace
from engine.control.trace_page import to_html
from tasks import workspace
from tasks.record import RunRecord


def save(run: str, trace: Trace) -> None:
    """Keeps a step's trace with the run."""
    path = _file(run, trace.stage, trace.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(formats.to_json(trace), encoding="utf-8")


def load(record: RunRecord, stage: str | None, step: int | None) -> Trace:
    """The trace of a step: without a stage of the last one that has traces, without a step of its last one.

    Raises:
        ValueError: there is none, or the file cannot be read; says which there are.
    """
    run = record.run
    # A stage that lay ready was traced by the run that made it.
    made_by = {entry.name: entry.reused_from or run for entry in record.stages}
    recorded = [stage for stage, maker in made_by.items() if _steps(maker, stage)]
    if not recorded:
        raise ValueError(f"run {run} has no traces yet; they are recorded by stages of kind rl, one a step")
    if stage is not None and stage not in recorded:
        raise ValueError(f"run {run} has no traces of a stage {stage!r}; it has some of: {', '.join(recorded)}")
    chosen = stage or recorded[-1]
    steps = _steps(made_by[chosen], chosen)
    if step is not None and step not in steps:
        raise ValueError(f"run {run} has no trace of step {step} of stage {chosen}; it has steps {steps[0]} to {steps[-1]}")
    path = _file(made_by[chosen], chosen, steps[-1] if step is None else step)
    try:
        return formats.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a trace that this version can read: {error}") from error


def write(trace: Trace, directory: Path) -> list[Path]:
    """As a page for people, as a Chrome trace (ui.perfetto.dev opens it) and as JSON. Returns the files."""
    name = f"step_{trace.step:06d}"
    contents = {f"{name}.html": to_html(trace), f"{name}.chrome.json": formats.to_chrome(trace), f"{name}.json": formats.to_json(trace)}
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in contents.items():
        (directory / file).write_text(text, encoding="utf-8")
    return [directory / file for file in contents]


def _file(run: str, stage: str, step: int) -> Path:
    return workspace.run_directory(run) / "traces" / stage / f"step_{step:06d}.json"


def _steps(run: str, stage: str) -> list[int]:
    """Steps of a stage that have a trace, in order."""
    names = [path.stem for path in (workspace.run_directory(run) / "traces" / stage).glob("step_*.json")]
    return sorted(int(name.removeprefix("step_")) for name in names if not name.endswith(".chrome"))

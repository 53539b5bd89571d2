"""The local record of a run: what was planned, how far it came, what it measured, and from what it was made.

`record.json` is rewritten whole after every change, and `lineage.json`, beside it, when that has changed: whoever reads them, also while the run
goes on or after it was killed, sees a consistent state.
"""

import difflib
import json
import os
import platform
import tempfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.reshard.ledger import Ledger
from tasks import lineage as lineages
from tasks import workspace
from tasks.lineage import Lineage

START_TIME_TOLERANCE_SECONDS = 2.0
"""Process start times are derived from the boot time, which moves a little when the clock is set."""


class Recorded(BaseModel):
    """Base of the record's parts: changed in place while the run goes on, each change checked."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, use_attribute_docstrings=True)


class BeforeAfter(Recorded):
    """Accuracy avg@k of one difficulty, as fractions."""

    before: float | None = None
    after: float | None = None


class Synchronisations(Recorded):
    """How a stage's weights came to its rollout engines, all times together."""

    count: int
    """An RL stage has one a step, an SFT stage one at its end."""
    ranks: list[Ledger]
    """Of each rank: sums over the synchronisations, of `proof_coverage` too; of `peak_extra_bytes` the largest."""


class StageRecord(Recorded):
    """One stage. Of stages that train, accuracies are fractions of 1 on the test set; intervals are [low, high]."""

    name: str
    kind: str
    """`sft`, `rl`, `difficulty`, ..."""
    status: Literal["planned", "running", "finished", "failed"] = "planned"
    steps_planned: int | None
    """None until a stage of so many epochs has begun, or one that does not train."""
    steps: int = 0
    """Steps done."""
    ended_by: Literal["steps", "convergence", "collapse"] | None = None
    """None before the end, and where an error was the end."""
    ended_because: str = ""
    """The numbers, where it was not the number of steps."""
    samples_per_prompt: int | None = None
    """k of avg@k."""
    confidence: float | None = None
    """Of the intervals."""
    accuracy_before: float | None = None
    """avg@k of the weights that the stage started from."""
    accuracy_after: float | None = None
    interval: tuple[float, float] | None = None
    """Bootstrap interval of accuracy_after."""
    interval_before: tuple[float, float] | None = None
    greedy_before: float | None = None
    greedy_after: float | None = None
    gain: float | None = None
    """accuracy_after - accuracy_before."""
    gain_interval: tuple[float, float] | None = None
    """Paired bootstrap over prompts."""
    by_difficulty: dict[str, BeforeAfter] = {}
    seconds: float | None = None
    """Wall-clock of the training, without evaluations."""
    seconds_by_phase: dict[str, float] = {}
    """generate, reward, log_prob, update, synchronise and other, summed over the steps."""
    tokens_per_second: float | None = None
    synchronisations: Synchronisations | None = None
    """None before the first."""
    temperature: float | None = None
    """At which an RL stage samples, where a search has picked it."""
    results: dict[str, float] = {}
    """What a stage that does not train found, by name; shares and rates are fractions of 1."""
    output: str | None = None
    """Directory of what the stage leaves."""
    reused_from: str | None = None
    """The run that made it, where it lay ready; all numbers of the training are that run's."""
    model: str | None = None
    """Directory of the stage's last weights, in Hugging Face format."""


class MLflowReference(Recorded):
    """Where MLflow keeps the run."""

    tracking_uri: str
    experiment: str
    experiment_id: str
    run_id: str


class ProcessIdentity(Recorded):
    """One process of one machine; a process id alone is given out again."""

    pid: int
    started: float
    """Unix time, seconds."""
    host: str

    @classmethod
    def current(cls) -> Self:
        """This process."""
        process = psutil.Process()
        return cls(pid=process.pid, started=process.create_time(), host=platform.node())

    def is_dead(self) -> bool:
        """True when the process ran on this machine and is gone. Of another machine's processes nothing is known: False."""
        if self.host != platform.node():
            return False
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            return abs(process.create_time() - self.started) > START_TIME_TOLERANCE_SECONDS
        except psutil.NoSuchProcess:
            return True


def now() -> str:
    """The time, ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class RunRecord(Recorded):
    """One run of a recipe."""

    run: str
    """Id, such as grpo_tiny-20261129-140312."""
    status: Literal["running", "finished", "failed", "killed"] = "running"
    """`killed` is never written: `load` finds a record that says running and a process that is dead."""
    recipe: str
    seed: int
    started: str = Field(default_factory=now)
    """ISO 8601, UTC."""
    finished: str | None = None
    error: str | None = None
    stages: list[StageRecord] = []
    final_model: str | None = None
    lineage: Lineage
    mlflow: MLflowReference | None = None
    log_file: str | None = None
    flow_run: str | None = None
    """Id of Prefect's flow run."""
    process: ProcessIdentity = Field(default_factory=ProcessIdentity.current)

    def stage(self, name: str) -> StageRecord:
        """The record of the stage `name`, to be changed in place."""
        return next(stage for stage in self.stages if stage.name == name)


def new_run_id(recipe: str) -> str:
    """Recipe and UTC second, as in grpo_tiny-20261129-140312; a number follows where that is taken."""
    first = f"{recipe}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    run, count = first, 1
    while workspace.run_directory(run).exists():
        count += 1
        run = f"{first}-{count}"
    return run


def record_file(run: str) -> Path:
    """Where the record of the run with id `run` lies."""
    return workspace.run_directory(run) / "record.json"


def lineage_file(run: str) -> Path:
    """Where the lineage of the run with id `run` lies."""
    return workspace.run_directory(run) / lineages.FILE


def write(record: RunRecord) -> None:
    """Replace the run's record.json, and its lineage.json where that has changed; a reader sees old files or new ones, also after a power cut.

    Raises:
        OSError: the disk is full or the directory is not writable; names the path.
    """
    lineage, text = lineage_file(record.run), record.lineage.model_dump_json(indent=2) + "\n"
    if not lineage.is_file() or lineage.read_text() != text:
        # First: no record is ever without its lineage.
        _replace(lineage, text)
    _replace(record_file(record.run), record.model_dump_json(indent=2, exclude={"lineage"}) + "\n")


def _replace(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".record-")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise type(error)(
            error.errno, f"cannot write the run's record ({error.strerror}); free disk space or mend its permissions", str(path)
        ) from error


def load(run: str) -> RunRecord:
    """The record of a run, `latest` for the newest. One that says running though its process is dead is shown as killed.

    Raises:
        ValueError: there is no such run (names the nearest ids), or its record cannot be read.
    """
    if run == "latest":
        return latest()
    known = run_ids()
    if run not in known:
        near = difflib.get_close_matches(run, known, n=3, cutoff=0.4) or known[:3]
        hint = f"nearest: {', '.join(near)}" if near else "there is none yet: `almanac run recipe=NAME` makes one"
        raise ValueError(f"unknown run {run!r}; {hint}")
    path, lineage = record_file(run), lineage_file(run)
    try:
        beside = {"lineage": json.loads(lineage.read_text())} if lineage.is_file() else {}
        record = RunRecord.model_validate({**json.loads(path.read_text()), **beside})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{path}: not a run record this version can read: {where}: {first['msg']}") from error
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path}: not a run record this version can read: {error}") from error
    if record.status == "running" and record.process.is_dead():
        record.status = "killed"
    return record


def run_ids() -> list[str]:
    """Ids of all runs that have a record, newest first."""
    files = sorted(workspace.runs_directory().glob("*/record.json"), key=lambda file: (_started(file.parent.name), file.parent.name))
    return [file.parent.name for file in reversed(files)]


def loadable() -> dict[str, RunRecord]:
    """All records by id, newest first; those that this version cannot read are left out."""
    found = {}
    for run in run_ids():
        with suppress(ValueError):
            found[run] = load(run)
    return found


def _started(run: str) -> str:
    """The time inside a run id (`RECIPE-DATE-TIME[-COUNT]`), which orders runs without their records being read."""
    digits = [part for part in run.split("-") if part.isdigit() and len(part) in (6, 8)]
    return "-".join(digits[-2:])


def latest() -> RunRecord:
    """The newest run's record.

    Raises:
        ValueError: there is no run yet.
    """
    known = run_ids()
    if not known:
        raise ValueError("there is no run yet: `almanac run recipe=NAME` makes one")
    return load(known[0])

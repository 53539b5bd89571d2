"""The local record of a run: what was planned, how far it came, what it measured, and from what it was made.

`record.json` is rewritten whole after every change, so that whoever reads it, also while the run goes on or after it was killed, sees a
consistent state.
"""

import difflib
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine import hardware
from engine.digest import file_digest
from engine.reshard.ledger import Ledger
from tasks import workspace
from tasks.config import RecipeConfig

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


class Lineage(Recorded):
    """From what the run was made; null where it cannot be known."""

    commit: str | None = None
    """Git commit of the code."""
    uncommitted: bool | None = None
    """Whether the code differed from that commit."""
    configuration_digest: str
    dataset_digests: dict[str, str] = {}
    base_model_digest: str | None = None
    lock_digest: str | None = None
    """SHA-256 of the package lock file."""
    seed: int
    hardware: dict[str, Any] = {}


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


def write(record: RunRecord) -> None:
    """Replace the run's record.json; a reader sees the old file or the new one, also after a power cut.

    Raises:
        OSError: the disk is full or the directory is not writable; names the path.
    """
    path = record_file(record.run)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".record-")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(record.model_dump_json(indent=2) + "\n")
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
    path = record_file(run)
    try:
        record = RunRecord.model_validate_json(path.read_text())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{path}: not a run record this version can read: {where}: {first['msg']}") from error
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


def lineage(config: RecipeConfig, *, dataset_digests: Mapping[str, str] | None = None, base_model_digest: str | None = None) -> Lineage:
    """Everything that a run's numbers depend on, taken down before it starts.

    Args:
        config: the resolved configuration.
        dataset_digests: digest of each split by its name.
        base_model_digest: digest of the first weights.
    """
    # What runs themselves bring up to date is no code.
    status = git("status", "--porcelain", "--", ".", ":(exclude)dvc.lock", ":(exclude)results")
    return Lineage(
        commit=commit(),
        uncommitted=None if status is None else bool(status),
        configuration_digest=config.digest(),
        dataset_digests=dict(dataset_digests or {}),
        base_model_digest=base_model_digest,
        lock_digest=_lock_digest(),
        seed=config.seed,
        hardware=hardware.describe(),
    )


def commit() -> str | None:
    """Git commit of the code; None where that is not known."""
    return git("rev-parse", "HEAD")


def git(*arguments: str) -> str | None:
    """What git prints about the checkout; None without git, or where the code is no git checkout."""
    try:
        answer = subprocess.run(["git", "-C", str(workspace.checkout()), *arguments], capture_output=True, text=True, timeout=30, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip()


def _lock_digest() -> str | None:
    """SHA-256 of the lock file that the installed torch belongs to; None where there is no lock file beside the code."""
    try:
        kind = "cpu" if metadata.version("torch").endswith("+cpu") else "gpu"
    except metadata.PackageNotFoundError:
        return None
    path = workspace.checkout() / "requirements" / f"{kind}.lock"
    return file_digest(path) if path.is_file() else None

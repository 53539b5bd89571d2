"""What the parts of one run share, and the frame around it: whatever happens, record and tracker end in a state that says so."""

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from engine.events import Event, PromptsScored, StageFinished, StageStarted, StepFinished, WeightsSynchronised
from engine.prompts import Prompt
from engine.reshard.ledger import Ledger
from engine.trainer.evaluation import Evaluation
from engine.trainer.session import Session
from tasks import drop_easy, workspace
from tasks import lineage as lineages
from tasks import record as records
from tasks.accuracy import Accuracy
from tasks.config import RecipeConfig
from tasks.data import PreparedData
from tasks.engines import Engine, Weights
from tasks.failure import reason
from tasks.progress import FINISH, Listener, Notice, PhaseFinished, PhaseStarted
from tasks.publishing import Publication
from tasks.record import RunRecord, StageRecord, Synchronisations
from tasks.stage_config import planned_steps
from tasks.tracking import Tracker

logger = logging.getLogger(__name__)

RESERVE_BYTES = 256 * 1024
"""Kept free for the record, so that it can say that the disk was full."""
SECONDS_BETWEEN_WRITES = 2.0
"""Steps may be short, and every write of the record waits for the disk."""


class RunContext:
    """One run: its configuration, its record and tracker, and what the stage functions leave for each other.

    No dataclass, and with slots: Prefect walks through the fields of flow parameters that it can open, and these hold all the data.
    """

    __slots__ = (
        "_written",
        "accuracy",
        "config",
        "data",
        "engine",
        "evaluation",
        "fresh",
        "listener",
        "outputs",
        "publication",
        "record",
        "steps",
        "test",
        "tracker",
        "weights",
    )

    data: PreparedData
    """Set by `prepare_data`, like `test`."""
    test: list[Prompt]
    weights: Weights
    """As they are now: set by `create_model`, and by every stage that trains."""
    evaluation: Evaluation | None
    """The newest one, with its summary in `accuracy`: after one stage and before the next. None before the first."""
    accuracy: Accuracy
    outputs: dict[str, Path]
    """Directory of what each stage leaves, of those that have begun."""
    steps: dict[int, dict[str, float]]
    """Metrics of the newest stage, by step."""

    def __init__(
        self, config: RecipeConfig, record: RunRecord, tracker: Tracker, publication: Publication, listener: Listener, *, fresh: bool = False
    ) -> None:
        self.config, self.record, self.tracker, self.publication, self.listener, self.fresh = config, record, tracker, publication, listener, fresh
        self.engine = Engine(config, self.directory, listener)
        self.evaluation = None
        self.outputs, self.steps = {}, {}
        self._written = 0.0

    @property
    def run(self) -> str:
        """The run's id."""
        return self.record.run

    @property
    def session(self) -> Session:
        """The engine, with the weights as they are now; it starts where it has to."""
        return self.engine.session(self.weights)

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return workspace.run_directory(self.run)

    def emit(self, event: Event) -> None:
        """Handed to the engine: what happened goes to the tracker, into the record, and to whoever watches, in this order.

        What prompts scored goes into the stage's output, and nowhere else.
        """
        if isinstance(event, PromptsScored):
            drop_easy.append(self.outputs[event.stage] / drop_easy.SCORES, event)
            return
        self.tracker.emit(event)
        match event:
            case StageStarted(stage=stage, steps=steps):
                self.record.stage(stage).status, self.record.stage(stage).steps_planned = "running", steps
                self.save()
            case WeightsSynchronised(stage=stage):
                add_synchronisation(self.record.stage(stage), event)
            case StepFinished(stage=stage):
                add_step(self.record.stage(stage), event)
                self.steps[event.step] = dict(event.metrics)
                if time.monotonic() - self._written > SECONDS_BETWEEN_WRITES:
                    self.save()
            case StageFinished(stage=stage, seconds=seconds):
                entry = self.record.stage(stage)
                entry.seconds, entry.ended_by, entry.ended_because = seconds, event.ended_by, event.why
                self.save()
        self.listener(event)

    def last_metrics(self) -> dict[str, float]:
        """Of the newest stage's last step."""
        return self.steps[max(self.steps)] if self.steps else {}

    def save(self) -> None:
        """Writes the record as it is now."""
        records.write(self.record)
        self._written = time.monotonic()


@contextmanager
def open_run(
    config: RecipeConfig,
    run: str,
    listener: Listener,
    *,
    fresh: bool = False,
    stages: Collection[str] | None = None,
    flow_run: str | None = None,
) -> Iterator[RunContext]:
    """Record and tracker of a new run. They end as finished when the block ends, as failed when it raises; the engine is gone then.

    Args:
        config: resolved.
        run: id that no run has yet.
        listener: is told about progress.
        fresh: everything is made anew, whatever lies ready.
        stages: those that the run is about; all without it.
        flow_run: id of Prefect's flow run, where there is one.

    Raises:
        OSError: the run's directory, or MLflow's local files, cannot be written.
    """
    record = _begun(config, run, stages, flow_run)
    records.write(record)
    reserve = workspace.run_directory(run) / ".reserve"
    try:
        reserve.write_bytes(bytes(RESERVE_BYTES))
        with Publication(config, listener) as publication, Tracker(config, record) as tracker:
            context = RunContext(config, record, tracker, publication, listener, fresh=fresh)
            if tracker.complaint is not None:
                listener(Notice(text=tracker.complaint))
            context.save()
            with closing(context.engine):
                try:
                    yield context
                except BaseException as error:
                    # Before the tracker closes: what it logs last is this record.
                    _mark_failed(record, error)
                    raise
                finally:
                    # DVC works while the engine ends and pictures are drawn.
                    publication.close()
            # Leaving the tracker draws the plots and closes MLflow's runs.
            listener(PhaseStarted(phase=FINISH))
            record.finished = records.now()
        if tracker.complaint is not None:
            listener(Notice(text=tracker.complaint))
        record.status = "finished"
        records.write(record)
        listener(PhaseFinished(phase=FINISH))
    except BaseException as error:
        reserve.unlink(missing_ok=True)
        _mark_failed(record, error)
        raise
    reserve.unlink()


def _begun(config: RecipeConfig, run: str, stages: Collection[str] | None, flow_run: str | None) -> RunRecord:
    """The record of a run of which nothing is done yet."""
    return RunRecord(
        run=run,
        recipe=config.name,
        seed=config.seed,
        stages=[
            StageRecord(name=name, kind=stage.kind, steps_planned=planned_steps(stage))
            for name, stage in config.stages.items()
            if stages is None or name in stages
        ],
        lineage=lineages.resolve(config, workspace.run_directory(run)),
        log_file=str(workspace.run_directory(run) / "almanac.log"),
        flow_run=flow_run,
    )


def _mark_failed(record: RunRecord, error: BaseException) -> None:
    record.status, record.error, record.finished = "failed", reason(error), records.now()
    for stage in record.stages:
        if stage.status == "running":
            stage.status = "failed"
    try:
        records.write(record)
    except OSError:
        # The error that ended the run is the one to report; a record that says running while its process is gone reads as killed.
        logger.exception("the record could not be marked as failed")


def add_step(stage: StageRecord, event: StepFinished) -> None:
    """Counts a step, and adds its seconds by phase and its tokens."""
    timings = {name.removeprefix("timing/").removesuffix("_seconds"): v for name, v in event.metrics.items() if name.startswith("timing/")}
    whole = timings.pop("step", sum(timings.values()))
    timings["other"] = max(0.0, whole - sum(timings.values()))
    seconds_before = sum(stage.seconds_by_phase.values())
    tokens = (stage.tokens_per_second or 0.0) * seconds_before + event.metrics.get("throughput/tokens_per_second", 0.0) * whole
    phases = dict(stage.seconds_by_phase)
    for phase, seconds in timings.items():
        phases[phase] = phases.get(phase, 0.0) + seconds
    total = sum(phases.values())
    stage.steps, stage.seconds, stage.seconds_by_phase = event.step, total, phases
    stage.tokens_per_second = tokens / total if total else None


def add_synchronisation(stage: StageRecord, event: WeightsSynchronised) -> None:
    """Counts a synchronisation, and adds what it cost each rank."""
    before = stage.synchronisations or Synchronisations(count=0, ranks=[Ledger()] * len(event.ranks))
    ranks = [sums + ledger for sums, ledger in zip(before.ranks, event.ranks, strict=True)]
    stage.synchronisations = Synchronisations(count=before.count + 1, ranks=ranks)

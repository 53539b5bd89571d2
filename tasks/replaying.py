"""Runs one operator of a recorded step again, alone, and says where its result differs from the recorded one."""

from collections.abc import Sequence
from pathlib import Path

from engine.config import RLStageConfig
from engine.trainer.replay import Difference, KeptOperation, kept_operations, kept_steps, replay, step_directory
from engine.trainer.session import Session
from tasks import journal, workspace
from tasks.check import check
from tasks.config import RecipeConfig
from tasks.journal import RunStarted
from tasks.problems import ConfigurationError
from tasks.prompt_files import prompts_file, short_enough
from tasks.record import RunRecord
from tasks.stages import first_weights, prepared


def configuration(record: RunRecord) -> RecipeConfig:
    """The configuration that a run was made with, from its event log.

    Raises:
        ValueError: this version of the code does not read it.
    """
    events = journal.read_events(workspace.run_directory(record.run) / "events.jsonl")
    started = next(event for event in events if isinstance(event, RunStarted))
    config, problems = check(started.configuration, fallback={})
    if config is None:
        raise ConfigurationError(problems)
    return config


def find(record: RunRecord, operator: str, step: int, stage: str | None) -> tuple[str, KeptOperation]:
    """The stage, and the kept operator that is meant.

    Raises:
        ValueError: it was not kept; says what was.
    """
    directory = workspace.run_directory(record.run)
    there = kept_steps(directory)
    if not there:
        raise ValueError(f"run {record.run} kept no calls; set stages.STAGE.keep_calls_every_steps=20 (or another number) in the next run")
    matching = [name for name, number in there if number == step and stage in (None, name)]
    if not matching:
        raise ValueError(f"run {record.run} did not keep that step; kept are: {', '.join(f'{name} {number}' for name, number in there)}")
    operations = kept_operations(step_directory(directory, matching[-1], step))
    chosen = [operation for operation in operations if str(operation) == operator]
    if not chosen:
        raise ValueError(f"step {step} has no operator {operator!r}; it has: {', '.join(dict.fromkeys(map(str, operations)))}")
    return matching[-1], chosen[0]


def run_again(record: RunRecord, stage: str, step: int, operation: KeptOperation, logs: Path) -> Sequence[Difference]:
    """The operator on its recorded input, on fresh workers with the state that the step began with.

    Raises:
        ValueError, ResourceError, WorkerError: as in a run.
    """
    config = configuration(record)
    settings = config.stages[stage]
    assert isinstance(settings, RLStageConfig), f"stage {stage} is of kind {settings.kind}, and keeps no calls"
    if (picked := record.stage(stage).temperature) is not None:
        settings = settings.at_temperature(picked)
    weights = first_weights(config)
    ready = prepared(config, weights)
    with Session.open(config.engine(), weights, logs) as session:
        outputs = {entry.name: Path(entry.output) for entry in record.stages if entry.output is not None}
        prompts, _ = short_enough(stage, settings, prompts_file(settings, outputs, ready), session.tokenizer)
        session.load_prompts(stage, prompts)
        session.begin_stage(settings)
        return replay(session, step_directory(workspace.run_directory(record.run), stage, step), operation)

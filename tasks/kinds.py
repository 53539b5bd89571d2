"""What a stage of each kind does, once it is its turn: everything that it leaves is in its output directory and in its part of the record."""

from collections.abc import Callable, Mapping
from pathlib import Path

from engine.config import RLStageConfig
from engine.events import StageFinished, StageStarted, StepFinished
from engine.prompts import Prompt
from engine.trainer.ends import CollapseError
from engine.trainer.sft import train_sft
from engine.trainer.sync import train_rl
from tasks import data, difficulty, drop_easy, temperature_search
from tasks.context import RunContext
from tasks.outputs import MODEL
from tasks.progress import Notice
from tasks.prompt_files import PROMPTS, prompts_file, short_enough, write_kept
from tasks.stage_config import AskingStageConfig, DifficultyStageConfig, DropEasyStageConfig, TemperatureSearchStageConfig, kind_of


def run(context: RunContext, name: str, directory: Path) -> None:
    """The stage `name`, into its output directory; one that trains leaves the run's weights changed.

    Raises:
        DataError: no prompt is left; names stage and key.
        CollapseError: the policy has collapsed; its weights are exported as they are, and are not the run's.
    """
    stage = context.config.stages[name]
    RUNNERS[stage.kind](context, name, directory)
    if kind_of(stage).trains:
        _export(context, name, directory)
    for file in sorted([*directory.glob("*.png"), *directory.glob("*.json")]):
        context.tracker.log_result(name, file, "plots" if file.suffix == ".png" else "results")


def _sft(context: RunContext, name: str, directory: Path) -> None:
    stage, session = context.config.stages[name], context.session
    assert stage.kind == "sft"
    context.engine.trains()
    train_sft(session, name, stage, data.load_conversations(context.data.unchanged("sft")), context.config.seed, context.emit)


def _rl(context: RunContext, name: str, directory: Path) -> None:
    stage, session = context.config.stages[name], context.session
    assert stage.kind == "rl"
    prompts = _asked(context, name, stage)
    if stage.temperature_from is not None:
        stage = _at_picked_temperature(context, name, stage, context.outputs[stage.temperature_from])
    drop_easy.begin_log(directory / drop_easy.SCORES)
    context.engine.trains()
    try:
        train_rl(session, name, stage, prompts, context.config.seed, context.emit)
    except CollapseError as error:
        # With the run, for whoever looks into it: the stage has no output.
        entry = context.record.stage(name)
        entry.ended_by, entry.ended_because = "collapse", str(error)
        entry.model = str(session.export(context.directory / "collapsed" / name / MODEL))
        context.tracker.log_model(name, entry.steps, Path(entry.model))
        raise


def _difficulty(context: RunContext, name: str, directory: Path) -> None:
    stage = context.config.stages[name]
    assert isinstance(stage, DifficultyStageConfig)
    prompts = _asked(context, name, stage)
    ratings = difficulty.rate(context.session, name, stage, prompts, context.config.seed, directory, context.emit)
    kept = difficulty.within(ratings, stage)
    source, key = prompts_file(stage, context.outputs, context.data), f"stages.{name}.keep"
    none = f"no prompt is left for those after stage {name}: none has a pass rate within {key}; widen it"
    write_kept(source, prompts, kept, directory / PROMPTS, none)
    context.record.stage(name).results = difficulty.results(ratings, len(kept))


def _drop_easy(context: RunContext, name: str, directory: Path) -> None:
    stage = context.config.stages[name]
    assert isinstance(stage, DropEasyStageConfig)
    context.emit(StageStarted(stage=name, kind=stage.kind, steps=1))
    source = prompts_file(stage, context.outputs, context.data)
    logs = [context.outputs[other] / drop_easy.SCORES for other in context.config.stages if other in stage.scores_of]
    results = drop_easy.filtered(source, logs, stage, directory / PROMPTS, f"stages.{name}.")
    context.record.stage(name).results = results
    context.emit(StepFinished(stage=name, step=1, metrics={f"data/{what}": count for what, count in results.items()}))
    context.emit(StageFinished(stage=name, steps=1, seconds=0.0))


def _temperature_search(context: RunContext, name: str, directory: Path) -> None:
    stage = context.config.stages[name]
    assert isinstance(stage, TemperatureSearchStageConfig)
    prompts = _asked(context, name, stage)
    matched = None if stage.matches is None else temperature_search.Search.read(context.outputs[stage.matches])
    found = temperature_search.search(context.session, name, stage, prompts, matched, context.config.seed, directory, context.emit)
    context.record.stage(name).results = temperature_search.results(found)
    if found.picked.warning is not None:
        context.listener(Notice(text=f"stage {name}: {found.picked.warning}"))


RUNNERS: Mapping[str, Callable[[RunContext, str, Path], None]] = {
    "sft": _sft,
    "rl": _rl,
    "difficulty": _difficulty,
    "drop_easy": _drop_easy,
    "temperature_search": _temperature_search,
}
"""By kind of stage."""


def _export(context: RunContext, name: str, directory: Path) -> None:
    """The policy as the run's weights: on the disk, in the record and in the tracker."""
    entry = context.record.stage(name)
    written = context.engine.export(directory / MODEL)
    entry.model = context.record.final_model = str(written.directory)
    context.weights = written
    context.tracker.log_model(name, entry.steps, written.directory)


def _at_picked_temperature(context: RunContext, name: str, stage: RLStageConfig, output: Path) -> RLStageConfig:
    """The stage, sampling at the temperature of a search; in the record too."""
    picked, evaluated = temperature_search.Search.read(output).picked.temperature, context.config.evaluation.sampling.temperature
    context.record.stage(name).temperature = picked
    context.listener(Notice(text=f"stage {name} samples at temperature {picked:g}, which {stage.temperature_from} has picked"))
    if evaluated > picked:
        context.listener(
            Notice(text=f"evaluation.sampling.temperature={evaluated:g} is above that: answers may be worse than the stage has made them")
        )
    return stage.at_temperature(picked)


def _asked(context: RunContext, name: str, stage: RLStageConfig | AskingStageConfig) -> list[Prompt]:
    path = prompts_file(stage, context.outputs, context.data)
    prompts, left_out = short_enough(name, stage, path, context.session.tokenizer)
    if left_out:
        context.listener(Notice(text=left_out))
    return prompts

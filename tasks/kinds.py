"""What a stage of each kind does, once it is its turn: everything that it leaves is in its output directory and in its part of the record."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from engine.atomic import atomic_file
from engine.config import RLStageConfig
from engine.events import StageFinished, StageStarted, StepFinished
from engine.prompts import Prompt
from engine.tokenizer import render_prompt
from engine.trainer.sft import train_sft
from engine.trainer.sync import train_rl
from tasks import data, difficulty, drop_easy
from tasks.context import RunContext
from tasks.data import PreparedData
from tasks.progress import Notice
from tasks.schemas import DataError
from tasks.stage_config import AskingStageConfig, DifficultyStageConfig, DropEasyStageConfig, kind_of

PROMPTS = "prompts.parquet"
"""The prompts that a stage gives to later ones, in its output: rows of the data set, as they were."""
MODEL = "model"
"""The weights that a stage leaves, in its output: an ordinary Hugging Face directory."""


def run(context: RunContext, name: str, directory: Path) -> None:
    """The stage `name`, from the weights that the engine holds, into its output directory.

    Raises:
        DataError: no prompt is left; names stage and key.
    """
    RUNNERS[context.config.stages[name].kind](context, name, directory)
    if kind_of(context.config.stages[name]).trains:
        _export(context, name, directory)
    for picture in sorted(directory.glob("*.png")):
        context.tracker.log_picture(name, picture)


def _sft(context: RunContext, name: str, directory: Path) -> None:
    stage = context.config.stages[name]
    assert stage.kind == "sft"
    train_sft(context.session, name, stage, data.load_conversations(context.data.path("sft")), context.config.seed, context.emit)


def _rl(context: RunContext, name: str, directory: Path) -> None:
    stage = context.config.stages[name]
    assert stage.kind == "rl"
    prompts = _asked(context, name, stage)
    drop_easy.begin_log(directory / drop_easy.SCORES)
    train_rl(context.session, name, stage, prompts, context.config.seed, context.emit)


def _difficulty(context: RunContext, name: str, directory: Path) -> None:
    stage = context.config.stages[name]
    assert isinstance(stage, DifficultyStageConfig)
    prompts = _asked(context, name, stage)
    ratings = difficulty.rate(context.session, name, stage, prompts, context.config.seed, directory, context.emit)
    kept = difficulty.within(ratings, stage)
    source, key = prompts_file(stage, context.outputs, context.data), f"stages.{name}.keep"
    write_kept(source, prompts, kept, directory, f"no prompt is left for those after stage {name}: none has a pass rate within {key}; widen it")
    context.record.stage(name).results = difficulty.results(ratings, len(kept))


def _drop_easy(context: RunContext, name: str, directory: Path) -> None:
    stage = context.config.stages[name]
    assert isinstance(stage, DropEasyStageConfig)
    context.emit(StageStarted(stage=name, kind=stage.kind, steps=1))
    source = prompts_file(stage, context.outputs, context.data)
    prompts = data.load_prompts(source)
    in_order = [other for other in context.config.stages if other in stage.scores_of]
    visits = [step for other in in_order for step in drop_easy.read(context.outputs[other] / drop_easy.SCORES)]
    found = drop_easy.estimates(visits, stage.estimator)
    dropped = drop_easy.easy(found, stage.threshold, stage.min_visits)
    ids = [prompt.id for prompt in prompts]
    key = f"stages.{name}.threshold={stage.threshold:g}"
    none = f"no prompt is left for those after stage {name}: all {len(ids)} have an estimate above {key}; raise it"
    write_kept(source, prompts, set(ids) - dropped, directory, none)
    context.record.stage(name).results = results = drop_easy.results(ids, found, dropped)
    context.emit(StepFinished(stage=name, step=1, metrics={f"data/{what}_prompts": count for what, count in results.items()}))
    context.emit(StageFinished(stage=name, steps=1, seconds=0.0))


RUNNERS: Mapping[str, Callable[[RunContext, str, Path], None]] = {"sft": _sft, "rl": _rl, "difficulty": _difficulty, "drop_easy": _drop_easy}
"""By kind of stage."""


def _export(context: RunContext, name: str, directory: Path) -> None:
    """The weights as they are now, in the output, in the record and in the tracker."""
    entry = context.record.stage(name)
    model = context.session.export(directory / MODEL)
    entry.model = context.record.final_model = str(model)
    context.tracker.log_model(name, entry.steps, model)


def _asked(context: RunContext, name: str, stage: RLStageConfig | AskingStageConfig) -> list[Prompt]:
    path = prompts_file(stage, context.outputs, context.data)
    prompts, left_out = short_enough(name, stage, path, context.session.tokenizer)
    if left_out:
        context.listener(Notice(text=left_out))
    return prompts


def prompts_file(stage: RLStageConfig | AskingStageConfig | DropEasyStageConfig, outputs: Mapping[str, Path], ready: PreparedData) -> Path:
    """The prompts that a stage reads: those of the stage that it refers to, by the outputs of all stages before, or those of the train split."""
    return ready.path("train") if stage.prompts is None else outputs[stage.prompts] / PROMPTS


def short_enough(name: str, stage: RLStageConfig | AskingStageConfig, path: Path, tokenizer: Any) -> tuple[list[Prompt], str | None]:
    """The file's prompts within the stage's own cap, and a sentence about those that are left out; the data were cut at the largest of all stages.

    Raises:
        DataError: no prompt is left.
    """
    prompts = data.load_prompts(path)
    kept = [prompt for prompt in prompts if len(render_prompt(tokenizer, prompt.messages)) <= stage.max_prompt_tokens]
    key = f"stages.{name}.max_prompt_tokens={stage.max_prompt_tokens}"
    if not kept:
        raise DataError(path, [f"no prompt is left for stage {name}: all {len(prompts)} have more tokens than {key}; raise it"])
    if len(kept) == len(prompts):
        return prompts, None
    return kept, f"stage {name}: {len(prompts) - len(kept)} prompts have more tokens than {key} and are left out"


def write_kept(source: Path, prompts: Sequence[Prompt], kept: Collection[str], directory: Path, none: str) -> None:
    """The rows of the file `source`, from which `prompts` are, whose ids are kept, as the prompts that a stage gives.

    Raises:
        DataError: none is left, with the text `none`.
    """
    rows = [prompt.index for prompt in prompts if prompt.id in kept]
    if not rows:
        raise DataError(source, [none])
    with atomic_file(directory / PROMPTS) as file:
        parquet.write_table(parquet.read_table(source).take(rows), file)

"""`python -m tasks.stage recipe=NAME stage=STAGE [key=value ...]`: one stage of a recipe by itself, where the stages before it lie ready.

It leaves what `almanac run` would leave, in the same place, and is not run again where that lies ready. Prints the directory.

With `evaluate=STAGE` in place of `stage=STAGE` the weights that the stage has left are evaluated, with `evaluate=base` those that the recipe starts
from. Prints the accuracy.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import record, workspace
from tasks.accuracy import Accuracy, described
from tasks.check import did_you_mean
from tasks.compose import compose
from tasks.config import RecipeConfig
from tasks.data_error import DataError
from tasks.progress import BASE, Listener, Notice, PhaseFinished, Report
from tasks.record import RunRecord, StageRecord
from tasks.run_lock import only_run
from tasks.stage_config import DropEasyStageConfig, kind_of, references

if TYPE_CHECKING:  # torch
    from tasks.context import RunContext

STAGE, EVALUATE = "stage=", "evaluate="
USUAL_GRID = {"low": 0.6, "high": 1.4, "step": 0.2}
"""Temperatures of a search that the recipe does not have."""


def main(arguments: Sequence[str]) -> None:
    """The command; bad input ends with its error on stderr and exit code 1."""
    asked = [argument for argument in arguments if argument.startswith((STAGE, EVALUATE))]
    workspace.quiet_environment()
    try:
        if len(asked) != 1:
            raise ValueError("say stage=NAME or evaluate=NAME once, beside recipe=NAME")
        config = compose([argument for argument in arguments if argument not in asked])
        run, name = record.new_run_id(config.name), asked[0].partition("=")[2]
        with only_run(run):
            if asked[0].startswith(STAGE):
                print(after_others(config, name, run, notices).output)
            else:
                print(described(evaluated_after(config, name, run, notices)))
    except ValueError as error:
        sys.exit(str(error))


def notices(event: Report) -> None:
    """A listener that writes to standard error what a person should know, and what came out of each part of the run."""
    if isinstance(event, Notice):
        print(event.text, file=sys.stderr)
    elif isinstance(event, PhaseFinished) and event.result:
        print(f"{event.phase}: {event.result}", file=sys.stderr)


def through(config: RecipeConfig, name: str | None) -> list[str]:
    """A stage, after all before it; without a name all stages.

    Raises:
        ValueError: the recipe has no such stage; names those that it has.
    """
    known = list(config.stages)
    if name is None:
        return known
    if name not in known:
        raise ValueError(f"recipe {config.name} has no stage {name}{did_you_mean(name, known)}; it has: {', '.join(known)}")
    return known[: known.index(name) + 1]


def after_others(config: RecipeConfig, name: str, run: str, listener: Listener) -> StageRecord:
    """A stage with what those before it have left, as part of a run that is about it. Returns its part of the record.

    Raises:
        ValueError: the recipe has no such stage, or one before it does not lie ready; names it.
    """
    *before, _ = through(config, name)
    return _run(config, before, name, run, listener)


def evaluated_after(config: RecipeConfig, label: str, run: str, listener: Listener) -> Accuracy:
    """Accuracy of the weights that the stage `label` has left, or of those that the recipe starts from (`base`), as part of a run that is about it.

    Raises:
        ValueError: no such stage trains, or one up to it does not lie ready; names it.
    """
    training = [name for name, stage in config.stages.items() if kind_of(stage).trains]
    if label not in (BASE, *training):
        raise ValueError(f"nothing of recipe {config.name} is evaluated as {label}; there are: {', '.join([BASE, *training])}")
    from tasks import stages  # torch

    with _ready(config, [] if label == BASE else through(config, label), (), run, listener) as context:
        stages.evaluate(context, label)
        return context.accuracy


def of_first_weights(config: RecipeConfig, name: str, run: str, listener: Listener) -> StageRecord:
    """A stage as if it were the recipe's first, as part of a run that is about it alone. Returns its part of the record."""
    return _run(config, [], name, run, listener)


def _run(config: RecipeConfig, before: Sequence[str], name: str, run: str, listener: Listener) -> StageRecord:
    from tasks import stages  # torch

    with _ready(config, before, [name], run, listener) as context:
        stages.run_stage(context, name)
        return context.record.stage(name)


@contextmanager
def _ready(config: RecipeConfig, before: Sequence[str], more: Sequence[str], run: str, listener: Listener) -> "Iterator[RunContext]":
    """A run about the stages `before`, as they lie ready, and `more`."""
    from tasks import stages  # torch
    from tasks.context import open_run

    with open_run(config, run, listener, stages=[*before, *more]) as context:
        stages.create_model(context)
        stages.prepare_data(context)
        for earlier in before:
            stages.run_stage(context, earlier, only_kept=True)
        yield context


def with_stage(config: RecipeConfig, kind: str, name: str | None) -> tuple[RecipeConfig, str]:
    """A recipe with a stage of kind difficulty or temperature_search that asks the training prompts, and that stage's name.

    That is the stage `name`, else the recipe's first one; else one is added, which asks as the recipe's first RL stage does.

    Raises:
        ValueError: the recipe has no such stage, or it takes something from another stage, or there is no RL stage to go by.
    """
    there = {key: stage for key, stage in config.stages.items() if stage.kind == kind}
    if name is None and not there:
        if not config.rl_stages():
            raise ValueError(f"recipe {config.name} has no stage of kind {kind} or rl; add one: 'stages.{kind}={{kind: {kind}, ...}}'")
        first = config.rl_stages()[0]
        reward = first.reward.model_copy(update={"shuffle": False, "on_failure": "zero"})
        caps = {"max_prompt_tokens": first.max_prompt_tokens, "max_response_tokens": first.max_response_tokens}
        added = {"kind": kind, **caps, "sampling": first.sampling.model_dump(), "reward": reward.model_dump()}
        if kind == "temperature_search":
            added |= {"sampling": {"stop": first.sampling.stop}, "grid": USUAL_GRID}
        stages = {**config.model_dump()["stages"], kind: added}
        return RecipeConfig.model_validate(config.model_dump() | {"stages": stages}), kind
    chosen = name or next(iter(there))
    if chosen not in there:
        raise ValueError(f"recipe {config.name} has no stage {chosen} of kind {kind}; it has: {', '.join(there) or 'none'}")
    for setting, other in references(there[chosen]):
        key = f"stages.{chosen}.{setting}"
        raise ValueError(f"{key}={other} is for a run of the whole recipe; take it out with {key}=null")
    return config, chosen


def drop_easy_of(found: RunRecord, settings: DropEasyStageConfig, target: Path) -> dict[str, float]:
    """The prompts that the last stage of `settings.scores_of` was trained on in a run, without the easy ones, into the file `target`.

    Returns what `drop_easy.filtered` says of it.

    Raises:
        ValueError: the run has no such stage of kind rl that has ended, or its files are not there any more.
    """
    from tasks import drop_easy
    from tasks.prompt_files import PROMPTS
    from tasks.replaying import configuration  # torch

    config, ended = configuration(found), {entry.name: entry for entry in found.stages if entry.kind == "rl" and entry.output and entry.model}
    for name in settings.scores_of:
        if name not in ended:
            raise ValueError(f"run {found.run} has no stage {name} of kind rl that has ended; it has: {', '.join(ended) or 'none'}")
    last = config.stages[settings.scores_of[-1]]
    assert last.kind == "rl"
    if last.prompts is None:
        source = workspace.data_directory(config.name) / "train.parquet"
    else:
        source = Path(found.stage(last.prompts).output or "") / PROMPTS
    logs = [Path(ended[name].output or "") / drop_easy.SCORES for name in config.stages if name in settings.scores_of]
    for file in (source, *logs):
        if not file.is_file():
            raise DataError(file, [f"is gone; run the recipe of {found.run} again"])
    return drop_easy.filtered(source, logs, settings, target)


if __name__ == "__main__":
    main(sys.argv[1:])

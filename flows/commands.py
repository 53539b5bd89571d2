"""One function for each verb of the command: prints, and returns the exit code. Heavy imports happen inside, so that the light verbs are quick."""

import argparse
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from flows.terminal import plain_console

if TYPE_CHECKING:
    from tasks.stage_config import StageConfig

DEFAULT_RECIPE = "polaris_tiny"
"""The main job: `make run`."""


def run(arguments: argparse.Namespace) -> int:
    """`almanac run`: 0 only when the last planned step was done."""
    from flows import run as runs

    runs.run(arguments.overrides, fresh=arguments.fresh, until=arguments.until)
    return 0


def preflight(arguments: argparse.Namespace) -> int:
    """`almanac preflight`: everything that would stop a run, without starting anything. What only this machine lacks fails with `--here` alone."""
    from flows.run import refuse
    from tasks import preflight as before
    from tasks.compose import compose
    from tasks.estimate import estimate
    from tasks.progress import devices

    config = compose(arguments.overrides)
    findings = before.preflight(config)
    refuse(findings, "error", *(["missing"] if arguments.here else []))
    missing = [finding for finding in findings if finding.level == "missing"]
    for finding in findings:
        if finding.level == "warning":
            print(f"warning: {finding}")
    stages = ", ".join(f"{name} ({', '.join([stage.kind, *_length(stage)])})" for name, stage in config.stages.items())
    print(f"{config.name} is {'right' if missing else 'ready to run'}: {stages}; {devices(config)}")
    with suppress(ValueError):
        # Of some models nothing is known before they are there.
        print(estimate(config).line())
    if missing:
        print("This machine lacks for it:", *missing, sep="\n  ")
    return 0


def estimate(arguments: argparse.Namespace) -> int:
    """`almanac estimate`: from the configuration alone."""
    from flows import estimate as views
    from tasks.compose import compose
    from tasks.cost import MEAN_SHARE
    from tasks.estimate import estimate as estimated

    share = MEAN_SHARE if arguments.mean_share is None else arguments.mean_share
    found = estimated(compose(arguments.overrides), arguments.device, share)
    if arguments.json:
        print(json.dumps(views.summary(found), indent=2))
    else:
        plain_console().print(views.table(found))
    return 0


def dvc(arguments: argparse.Namespace) -> int:
    """`almanac dvc`: 1 with `--check` where the files are not what the recipe says."""
    from tasks import dvc_graph
    from tasks.compose import compose

    config = compose(arguments.overrides) if arguments.overrides else dvc_graph.read_params()
    if not arguments.check:
        for path in dvc_graph.write(config):
            print(path)
        return 0
    wrong = dvc_graph.differences(config if arguments.overrides else compose([f"recipe={config.name}"]))
    for line in wrong:
        print(line)
    return 1 if wrong else 0


def _length(stage: "StageConfig") -> list[str]:
    """How long a stage that trains is; nothing of others, which are as long as it takes."""
    from tasks.stage_config import planned_steps

    if stage.kind == "sft" and stage.epochs:
        return [f"{stage.epochs} epochs"]
    steps = planned_steps(stage)
    most = "at most " if stage.kind == "rl" and stage.ends.convergence else ""
    return [] if steps is None else [f"{most}{steps} steps"]


def validate(arguments: argparse.Namespace) -> int:
    """`almanac validate`: 1 where the data are not fit to be trained on, whatever `data.quality` says."""
    from tasks.compose import compose
    from tasks.stages import first_weights, prepared
    from tasks.validate import PAGE
    from tasks.validate import validate as check

    config = compose(arguments.overrides)
    found = check(config, prepared(config, first_weights(config)))
    for problem in found.problems:
        print(f"failed: {problem}")
    print(f"{found.directory / PAGE}: {found.checks} checks, {len(found.problems)} failed")
    return 1 if found.problems else 0


def show(arguments: argparse.Namespace) -> int:
    """`almanac show`."""
    from tasks import record
    from tasks import show as views

    found = record.load(arguments.run)
    if arguments.json:
        print(json.dumps(views.summary(found), indent=2))
    else:
        plain_console().print(views.table(found))
    return 0


def trace(arguments: argparse.Namespace) -> int:
    """`almanac trace`."""
    from tasks import record, traces, workspace

    found = record.load(arguments.run)
    recorded = traces.load(found, arguments.stage, arguments.step)
    directory = Path(arguments.output) if arguments.output else workspace.run_directory(found.run) / "traces" / recorded.stage
    for path in traces.write(recorded, directory):
        print(path)
    return 0


def replay(arguments: argparse.Namespace) -> int:
    """`almanac replay`: 1 when a result differs by more than the tolerance."""
    from flows import run as runs

    found, stage, differences = runs.replay(arguments.run, arguments.operator, arguments.step, arguments.stage)
    title = f"{arguments.operator} of {found}, stage {stage}, step {arguments.step}, run again"
    table = Table(box=None, padding=(0, 3, 0, 0), title=title, title_justify="left")
    for name in ("rank", "column", "largest difference"):
        table.add_column(name, justify="left" if name == "column" else "right")
    for difference in differences:
        table.add_row(str(difference.rank), difference.column, "equal" if difference.largest == 0 else f"{difference.largest:.3g}")
    plain_console().print(table)
    return 0 if all(difference.largest <= arguments.tolerance for difference in differences) else 1


def reshard_plan(arguments: argparse.Namespace) -> int:
    """`almanac reshard-plan`: from the model's configuration alone."""
    from flows import reshard

    planned = reshard.plan(arguments.model, arguments.fsdp, arguments.tp, arguments.bucket_megabytes, arguments.dtype)
    if arguments.json:
        print(json.dumps(reshard.summary(planned), indent=2))
    else:
        plain_console().print(reshard.table(planned, arguments.model))
    return 0


def ui(arguments: argparse.Namespace) -> int:
    """`almanac ui`: until Ctrl-C."""
    from tasks import record
    from tasks import show as views

    known = arguments.run is not None or record.run_ids()
    views.ui(record.load(arguments.run or "latest") if known else None, arguments.port)
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """`almanac doctor`: 1 when something is missing that every run needs."""
    from flows import doctor as examination

    found = examination.examine()
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        plain_console().print(examination.table(found))
    return 1 if found["problems"] else 0


def evaluate(arguments: argparse.Namespace) -> int:
    """`almanac evaluate`."""
    from flows import run as runs

    config, accuracy = runs.evaluate(arguments.model, _with_recipe(arguments.overrides))
    average, greedy = f"avg@{accuracy.samples_per_prompt}", "greedy"
    whole = {average: accuracy.average, greedy: accuracy.greedy}
    parts = {average: accuracy.average_by_difficulty, greedy: accuracy.greedy_by_difficulty}
    if arguments.json:
        found = {name: {"mean": i.mean, "interval": [i.low, i.high]} for name, i in whole.items()}
        for name, intervals in parts.items():
            found[name]["by_difficulty"] = {key: {"mean": i.mean, "interval": [i.low, i.high]} for key, i in intervals.items()}
        print(json.dumps({"model": arguments.model, "recipe": config.name, "prompts": accuracy.prompts, **found}, indent=2))
        return 0
    table = Table(box=None, padding=(0, 3, 0, 0), title=f"Accuracy on {accuracy.prompts} test prompts, %", title_justify="left")
    table.add_column("difficulty", justify="right")
    for name in whole:
        table.add_column(f"{name} [{100 * config.evaluation.confidence:g} % interval]", justify="right")
    for key in accuracy.average_by_difficulty:
        table.add_row(key, *(_percent(parts[name][key]) for name in parts))
    table.add_row("all", *(_percent(interval) for interval in whole.values()), style="bold")
    plain_console().print(table)
    return 0


def difficulty(arguments: argparse.Namespace) -> int:
    """`almanac difficulty`."""
    from flows import run as runs
    from tasks import difficulty as ratings

    config, found = runs.asked(arguments.model, _with_recipe(arguments.overrides), "difficulty", arguments.stage)
    directory = Path(found.output or "")
    counts = json.loads((directory / ratings.HISTOGRAM).read_text())["prompts_by_right_samples"]
    if arguments.json:
        told = {"model": arguments.model, "recipe": config.name, "stage": found.name, **found.results, "prompts_by_right_samples": counts}
        print(json.dumps({**told, "output": found.output}, indent=2))
        return 0
    table = Table(box=None, padding=(0, 3, 0, 0))
    for heading in (f"right of {len(counts) - 1}", "prompts", "share"):
        table.add_column(heading, justify="right")
    for right, count in enumerate(counts):
        table.add_row(str(right), f"{count:,}", f"{100 * count / sum(counts):.1f} %")
    plain_console().print(table)
    _print_results(found.results, directory)
    return 0


def temperature_search(arguments: argparse.Namespace) -> int:
    """`almanac temperature-search`."""
    from flows import run as runs
    from tasks.temperature_search import Search

    config, stage = runs.asked(arguments.model, _with_recipe(arguments.overrides), "temperature_search", arguments.stage)
    directory = Path(stage.output or "")
    found = Search.read(directory)
    if arguments.json:
        told = {"model": arguments.model, "recipe": config.name, "stage": stage.name, **found.model_dump(mode="json")}
        print(json.dumps({**told, "output": stage.output}, indent=2))
        return 0
    title = f"{found.samples_per_prompt} samples to each of {found.prompts} prompts, in {found.unit}"
    table = Table(box=None, padding=(0, 3, 0, 0), title=title, title_justify="left")
    for heading in ("temperature", "accuracy, %", "diversity", "entropy", "entropy at 1", "tokens"):
        table.add_column(heading, justify="right")
    for point in found.points:
        accuracy = f"{100 * point.accuracy:.1f} [{100 * point.accuracy_low:.1f}, {100 * point.accuracy_high:.1f}]"
        entropies = f"{point.entropy:.3f}", f"{point.entropy_temperature_1:.3f}"
        style = "bold" if point.temperature == found.picked.temperature else None
        table.add_row(f"{point.temperature:g}", accuracy, f"{point.diversity:.3f}", *entropies, f"{point.tokens_mean:.1f}", style=style)
    plain_console().print(table, f"picked {found.picked.temperature:g}: {found.picked.because}", str(directory), sep="\n", soft_wrap=True)
    return 0


def drop_easy(arguments: argparse.Namespace) -> int:
    """`almanac drop-easy`."""
    from tasks import record, workspace
    from tasks.stage import drop_easy_of
    from tasks.stage_config import DropEasyStageConfig

    found = record.load(arguments.run)
    settings = DropEasyStageConfig(
        kind="drop_easy",
        scores_of=arguments.stage,
        threshold=arguments.threshold,
        estimator=arguments.estimator,
        min_visits=arguments.min_visits,
    )
    target = Path(arguments.output) if arguments.output else workspace.work_directory() / "drop_easy" / f"{found.run}.parquet"
    results = drop_easy_of(found, settings, target)
    if arguments.json:
        print(json.dumps({"run": found.run, "stages": settings.scores_of, **results, "output": str(target)}, indent=2))
    else:
        _print_results(results, target)
    return 0


def _print_results(results: Mapping[str, float], output: Path) -> None:
    from tasks.show import results_text

    plain_console().print(results_text(results), str(output), sep="\n", soft_wrap=True)


def _with_recipe(overrides: list[str]) -> list[str]:
    return overrides if any(override.startswith("recipe=") for override in overrides) else [f"recipe={DEFAULT_RECIPE}", *overrides]


def list_names(arguments: argparse.Namespace) -> int:
    """`almanac list`: everything that a recipe can name."""
    from engine.algorithms.registry import ADVANTAGES, LOSSES
    from engine.rewards.registry import REWARDS
    from engine.rollout import registry as rollout
    from engine.training import registry as training
    from engine.workers.registry import ANNOTATORS
    from tasks.compose import choices

    groups = {
        "recipes": ("recipe=NAME", choices("recipe")),
        "models": ("model=NAME", choices("model")),
        "data": ("data=NAME", choices("data")),
        "algorithms": ("algorithm@stages.STAGE.algorithm=NAME", choices("algorithm")),
        "resources": ("resources=NAME", choices("resources")),
        "training": ("training=NAME", choices("training")),
        "rollout": ("rollout=NAME", choices("rollout")),
        "rewards": ("stages.STAGE.reward.default=NAME, or by_data_source", _described(REWARDS)),
        "advantage estimators": ("stages.STAGE.algorithm.advantage.estimator=NAME", _described(ADVANTAGES)),
        "policy losses": ("stages.STAGE.algorithm.loss.name=NAME", _described(LOSSES)),
        "training backends": ("training.backend=NAME", _described(training.BACKENDS)),
        "rollout backends": ("rollout.backend=NAME", _described(rollout.BACKENDS)),
        "annotators": ("annotators.NAME.worker=NAME", _described(ANNOTATORS)),
    }
    console = plain_console()
    for title, (how, names) in groups.items():
        console.print(Text.assemble((title, "bold"), "  ", (how, "dim")))
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, min_width=16)
        grid.add_column()
        for name, text in names.items():
            grid.add_row(f"  {name}", text)
        console.print(grid, "")
    return 0


def _described(registry: Any) -> dict[str, str]:
    return {name: registry.describe(name) for name in registry.names()}


def _percent(interval: Any) -> str:
    return f"{100 * interval.mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"

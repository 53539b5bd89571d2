"""`almanac reference make`: one run for each seed, each an ordinary one; those that are there already are not run again."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from flows import child_run
from flows.run import checked, observed
from tasks import checkout, record, reference, workspace
from tasks.comparison import LEAST_SEEDS
from tasks.compose import compose
from tasks.problems import ConfigurationError, Problem
from tasks.progress import Notice, told
from tasks.record import RunRecord


def make(recipe: str, seeds: int, overrides: Sequence[str]) -> Path:
    """Makes or replaces the reference that has the configuration's name; see `tasks.reference`. Made again after an interruption, it goes on.

    Args:
        recipe: file in conf/recipe.
        seeds: so many, from 1 on.
        overrides: beside the recipe; `name=NAME` gives the reference of a changed recipe a name of its own.

    Raises:
        ConfigurationError: too few seeds, a seed among the overrides, or what would stop a run.
        RuntimeError: a run failed; names it.
    """
    if seeds < LEAST_SEEDS:
        text = f"{seeds} are too few: the spread between runs would not be known; give at least {LEAST_SEEDS}"
        raise ConfigurationError([Problem("--seeds", text)])
    if any(override.lstrip("+").partition("=")[0] == "seed" for override in overrides):
        raise ConfigurationError([Problem("seed", f"every run of a reference has its own, from 1 to {seeds}; leave it out")])
    if recipe_given := next((override for override in overrides if override.startswith("recipe=")), None):
        raise ConfigurationError([Problem("recipe", f"it is given as {recipe}; leave {recipe_given} out")])
    settings = [f"recipe={recipe}", *overrides]
    config, warnings = compose(settings), checked(compose(settings))
    directory = workspace.work_directory() / "references" / config.name
    runs: list[RunRecord] = []
    with observed(directory / "almanac.log", f"reference {config.name}", [f"seed {seed}" for seed in range(1, seeds + 1)]) as display:
        for warning in warnings:
            display.show(Notice(text=warning))
        for seed in range(1, seeds + 1):
            with told(display.show, f"seed {seed}") as result:
                runs.append(_run(config.name, [*settings, f"seed={seed}"], directory / f"seed_{seed}.log"))
                result.append(runs[-1].run)
        made = reference.build(config, recipe, overrides, runs)
        path = reference.write(made)
        if made.uncommitted:
            display.show(Notice(text="the code differs from its commit: nobody can say later what this reference was made with"))
        display.close(f"{path}: {len(made.seeds)} seeds, {made.seconds:.0f} s a run, configuration {made.configuration_hash[:16]}")
    return path


def _run(name: str, settings: Sequence[str], log: Path) -> RunRecord:
    """The run with these settings: one that is there already, or a new one."""
    config = compose(settings)
    there = reference.reusable(record.loadable(), config, checkout.commit())
    if there is not None:
        return there
    outcome = child_run.run(settings, log)
    if outcome.status != "finished" or outcome.record is None:
        command = shlex.join(["almanac", "run", *settings])
        raise RuntimeError(
            f"reference {name}: {command} {outcome.status}: {outcome.reason}; its log is {log}. Made again, the reference goes on from here"
        )
    return outcome.record

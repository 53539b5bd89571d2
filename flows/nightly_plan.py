"""What a night will run: everything that can be known of its recipes before anything starts."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from flows.parameters import DevicePool, pool_of
from flows.run import checked
from tasks import nights, reference, rounds
from tasks.check import did_you_mean
from tasks.compose import choices, compose
from tasks.config import RecipeConfig
from tasks.nights import Part
from tasks.problems import ConfigurationError, Problem
from tasks.reference import Reference


@dataclass(frozen=True, slots=True)
class Planned:
    """A recipe of the night."""

    reference: Reference
    config: RecipeConfig
    """With its seed."""
    overrides: Sequence[str]
    """What gives it."""
    part: Part | None
    """Of the recipe; None: all of it."""


def planned(names: Sequence[str], night: str, budget_seconds: float, *, next_stage: bool) -> tuple[list[Planned], list[str]]:
    """The recipes of the references `names`, and what a person should be warned of. With `next_stage`, the next part of each.

    Raises:
        ConfigurationError: all that is wrong with any of them.
    """
    problems = [Problem("--budget-seconds", f"{budget_seconds:g} leaves no time; give a number above 0")] if not budget_seconds > 0 else []
    problems += [Problem(name, "is named more than once") for name in dict.fromkeys(names) if names.count(name) > 1]
    found, warnings = [], []
    for name in dict.fromkeys(names):
        try:
            one = _planned(name, night, next_stage=next_stage)
            found.append(one)
            warnings += [f"{name}: {warning}" for warning in checked(one.config)]
        except ConfigurationError as error:
            problems += [problem if problem.key == name else Problem(f"{name}: {problem.key}", problem.text) for problem in error.problems]
        except ValueError as error:
            problems.append(Problem(name, str(error)))
    if problems:
        raise ConfigurationError(problems)
    return found, warnings


def references_for(devices: DevicePool) -> tuple[str, ...]:
    """Names of all references whose recipes take such devices.

    Raises:
        ConfigurationError: there is none.
    """
    found = [reference.load(name) for name in reference.known()]
    names = tuple(one.name for one in found if pool_of(compose([f"recipe={one.recipe}", *one.overrides])) == devices)
    if not names:
        text = f"there is no reference yet of a recipe for {devices} devices; `almanac reference make RECIPE` makes one"
        raise ConfigurationError([Problem("names", text)])
    return names


def _planned(name: str, night: str, *, next_stage: bool) -> Planned:
    known, recipes = reference.known(), choices("recipe")
    if name not in known:
        there_are = f"there are: {', '.join(known)}" if known else "there is none yet"
        if name in recipes:
            raise ConfigurationError(
                [Problem(name, f"the recipe has no reference ({there_are}); `{shlex.join(['almanac', 'reference', 'make', name])}` makes one")]
            )
        raise ConfigurationError([Problem(name, f"neither a reference nor a recipe{did_you_mean(name, [*known, *recipes])}; {there_are}")])
    found = reference.load(name)
    overrides = [f"recipe={found.recipe}", *found.overrides]
    config = compose(overrides)
    reference.check(found, config)
    part = rounds.next_part(name, reference.digest(found), config, night) if next_stage else None
    seed = nights.seed(part.begun if part else night)
    return Planned(found, config.model_copy(update={"seed": seed}), [*overrides, f"seed={seed}"], part)

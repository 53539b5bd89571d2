"""Which part of a recipe a night runs, where a whole run takes longer than a night: one after the other, with the seed of the round's first night.

A part ends with a stage that trains; what stands behind the last one belongs to the last part. The nights' records say how far a round has come. A
part that was stopped when the budget was spent, or not started, is tried again; a round of which one has failed is given up.
"""

from tasks import nights
from tasks.config import RecipeConfig
from tasks.nights import Part
from tasks.stage_config import kind_of


def parts(config: RecipeConfig) -> list[list[str]]:
    """Names of all stages, in order, by part."""
    found: list[list[str]] = [[]]
    for name, stage in config.stages.items():
        found[-1].append(name)
        if kind_of(stage).trains:
            found.append([])
    *whole, rest = found
    if whole:
        whole[-1] += rest
    return whole or [rest]


def next_part(name: str, reference_digest: str, config: RecipeConfig, night: str) -> Part:
    """What `night` is to run.

    Args:
        name: of the reference; rounds that were compared with another content of it are over.
        reference_digest: that content's.
        config: of the recipe.
        night: id.
    """
    found = parts(config)
    newest = next(
        (
            recipe
            for one in nights.nights()
            for recipe in one.recipes
            if one.night < night and (recipe.name, recipe.reference_digest) == (name, reference_digest) and recipe.part is not None
        ),
        None,
    )
    begun, done = night, 0
    if newest is not None and newest.part is not None and newest.outcome != "failed":
        reached = newest.part.number - (newest.outcome != "finished")
        # A round whose first night was not started has made nothing anew yet.
        if reached < len(found) and (reached, newest.outcome) != (0, "not started"):
            begun, done = newest.part.begun, reached
    return Part(begun=begun, stages=found[done], number=done + 1, of=len(found))

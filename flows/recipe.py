"""A recipe, stage by stage."""

from prefect import flow

from flows.crash import HOOKS
from flows.data import data
from flows.evaluation import evaluation
from flows.parameters import Override, RecipeName, Seconds
from flows.stage import FLOWS
from flows.watch import run_of
from tasks.progress import BASE
from tasks.stage_config import kind_of


@flow(name="recipe", flow_run_name="{recipe}", **HOOKS)
def recipe(recipe: RecipeName, overrides: tuple[Override, ...] = (), fresh: bool = False, timeout_seconds: Seconds | None = None) -> str:
    """All stages in the order written. One evaluation between two stages is the end of one and the beginning of the other.

    Returns the run's id.

    Args:
        recipe: file in conf/recipe.
        overrides: settings, key=value in Hydra's grammar.
        fresh: everything is made anew; else stages and evaluations that lie ready, made from the same, are taken as they are.
        timeout_seconds: after so many the run is stopped; never without it.
    """
    with run_of(recipe, overrides, fresh=fresh, timeout_seconds=timeout_seconds) as context:
        data(recipe, overrides)
        evaluation(recipe, BASE, overrides)
        for name, stage in context.config.stages.items():
            FLOWS[stage.kind](recipe, name, overrides)
            if kind_of(stage).trains:
                evaluation(recipe, name, overrides)
        return context.run

"""A recipe, stage by stage."""

from prefect import flow

from flows.data import data
from flows.evaluation import evaluation
from flows.stage import FLOWS
from tasks.config import RecipeConfig
from tasks.context import open_run
from tasks.progress import BASE, Listener
from tasks.stage_config import kind_of


@flow(name="recipe", flow_run_name="{run}", validate_parameters=False)
def recipe(config: RecipeConfig, run: str, listener: Listener, fresh: bool = False) -> None:
    """All stages in the order written. One evaluation between two stages is the end of one and the beginning of the other.

    Args:
        config: resolved.
        run: id that no run has yet.
        listener: is told about progress.
        fresh: everything is made anew; else stages and evaluations that lie ready, made from the same, are taken as they are.
    """
    with open_run(config, run, listener, fresh=fresh) as context:
        data(context)
        evaluation(context, BASE)
        for name, stage in config.stages.items():
            FLOWS[stage.kind](context, name)
            if kind_of(stage).trains:
                evaluation(context, name)

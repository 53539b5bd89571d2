"""A recipe, stage by stage."""

from contextlib import nullcontext

from prefect import flow

from flows import artifacts
from flows.crash import HOOKS
from flows.parameters import Override, RecipeName, Seconds
from flows.units import beside, create_model, evaluate, prepare_data, run_stage, start_engine, validate_data
from flows.watch import run_of
from tasks.progress import BASE
from tasks.stage import through
from tasks.stage_config import kind_of


@flow(name="recipe", flow_run_name="{recipe}", **HOOKS)
def recipe(
    recipe: RecipeName,
    overrides: tuple[Override, ...] = (),
    fresh: bool = False,
    until: str | None = None,
    timeout_seconds: Seconds | None = None,
) -> str:
    """All stages in the order written. One evaluation between two stages is the end of one and the beginning of the other.

    Returns the run's id.

    Args:
        recipe: one of the files in conf/recipe.
        overrides: settings of the recipe, one an item: `key=value` in Hydra's grammar, such as `seed=7` or `~stages.sft`.
        fresh: everything is made anew. Else stages and evaluations that lie ready, made from the same, are taken as they are.
        until: name of the stage that the run ends with; None: the last one.
        timeout_seconds: the run is stopped so many seconds after its turn has come; None: never.
    """
    with run_of(recipe, overrides, about=lambda config: through(config, until), fresh=fresh, timeout_seconds=timeout_seconds) as context:
        create_model()
        prepare_data()
        with beside(validate_data) if context.config.data.quality != "off" else nullcontext():
            start_engine()
        evaluate(BASE)
        for name in through(context.config, until):
            run_stage(name)
            if kind_of(context.config.stages[name]).trains:
                evaluate(name)
            artifacts.stage_table(context.record, name)
        return context.run

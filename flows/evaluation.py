"""Accuracy on the held-out test set."""

from prefect import flow

from flows import artifacts
from flows.crash import HOOKS
from flows.parameters import Override, RecipeName, Seconds
from flows.units import create_model, evaluate, prepare_data, run_stage
from flows.watch import run_of
from tasks.config import RecipeConfig
from tasks.progress import BASE
from tasks.stage import through
from tasks.stage_config import kind_of


@flow(name="evaluation", flow_run_name="evaluation {label} of {recipe}", **HOOKS)
def evaluation(recipe: RecipeName, label: str = BASE, overrides: tuple[Override, ...] = (), timeout_seconds: Seconds | None = None) -> str:
    """Of the first weights, and after each stage up to `label` as it lies ready. Returns the run's id.

    An evaluation that lies ready, made from the same, is taken as it is.

    Args:
        recipe: one of the files in conf/recipe.
        label: `base`, for the weights that the recipe starts from, or the name of a stage that trains: the last one to be evaluated.
        overrides: settings of the recipe, one an item: `key=value` in Hydra's grammar, such as `seed=7` or `~stages.sft`.
        timeout_seconds: the run is stopped so many seconds after its turn has come; None: never.
    """

    def stages(config: RecipeConfig) -> list[str]:
        return [] if label == BASE else through(config, label)

    with run_of(recipe, overrides, about=stages, timeout_seconds=timeout_seconds) as context:
        create_model()
        prepare_data()
        evaluate(BASE)
        for name in stages(context.config):
            run_stage(name, only_kept=True)
            if kind_of(context.config.stages[name]).trains:
                evaluate(name)
        if label != BASE:
            artifacts.stage_table(context.record, label)
        return context.run

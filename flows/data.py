"""From nothing to weights and checked data."""

from prefect import flow

from flows.crash import HOOKS
from flows.parameters import Override, RecipeName, Seconds
from flows.units import create_model, prepare_data, validate_data
from flows.watch import run_of


@flow(name="data", flow_run_name="data of {recipe}", **HOOKS)
def data(recipe: RecipeName, overrides: tuple[Override, ...] = (), timeout_seconds: Seconds | None = None) -> str:
    """The model, whose tokenizer counts the prompts' tokens, and the data. Returns the run's id.

    Args:
        recipe: one of the files in conf/recipe.
        overrides: settings of the recipe, one an item: `key=value` in Hydra's grammar, such as `seed=7` or `~stages.sft`.
        timeout_seconds: the run is stopped so many seconds after its turn has come; None: never.
    """
    with run_of(recipe, overrides, about=lambda config: [], timeout_seconds=timeout_seconds) as context:
        create_model()
        prepare_data()
        if context.config.data.quality != "off":
            validate_data()
        return context.run

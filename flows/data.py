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
        recipe: file in conf/recipe.
        overrides: settings, key=value in Hydra's grammar.
        timeout_seconds: after so many the run is stopped; never without it.
    """
    with run_of(recipe, overrides, about=lambda config: [], timeout_seconds=timeout_seconds) as context:
        create_model()
        prepare_data()
        if context.config.data.quality != "off":
            validate_data()
        return context.run

"""From nothing to weights and checked data."""

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from tasks import stages
from tasks.context import RunContext

create_model = task(name="create model", task_run_name="create model", cache_policy=NO_CACHE)(stages.create_model)
prepare_data = task(name="prepare data", task_run_name="prepare data", cache_policy=NO_CACHE)(stages.prepare_data)
validate_data = task(name="validate data", task_run_name="validate data", cache_policy=NO_CACHE)(stages.validate_data)


@flow(name="data", flow_run_name="{context.run}-data", validate_parameters=False)
def data(context: RunContext) -> None:
    """The model comes first: its tokenizer counts the prompts' tokens."""
    create_model(context)
    prepare_data(context)
    if context.config.data.quality != "off":
        validate_data(context)

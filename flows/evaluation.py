"""Accuracy on the held-out test set."""

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from tasks import stages
from tasks.context import RunContext

evaluate = task(name="evaluate", task_run_name="evaluate {label}", cache_policy=NO_CACHE)(stages.evaluate)


@flow(name="evaluation", flow_run_name="{context.run}-evaluation-{label}", validate_parameters=False)
def evaluation(context: RunContext, label: str) -> None:
    """Of the weights as they are now: `base`, or those after the stage `label`."""
    evaluate(context, label)

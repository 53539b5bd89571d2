"""Reinforcement learning."""

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from tasks import stages
from tasks.context import RunContext

train = task(name="train by RL", task_run_name="train {name}", cache_policy=NO_CACHE)(stages.train)
export = task(name="export", task_run_name="export {name}", cache_policy=NO_CACHE)(stages.export)


@flow(name="rl", flow_run_name="{context.run}-{stage}", validate_parameters=False)
def rl(context: RunContext, stage: str) -> None:
    """One stage of kind rl."""
    train(context, stage)
    export(context, stage)

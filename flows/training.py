"""Stages that train: supervised fine-tuning and reinforcement learning."""

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from tasks import stages
from tasks.context import RunContext

train = task(name="train", task_run_name="train {name}", cache_policy=NO_CACHE)(stages.train)
export = task(name="export", task_run_name="export {name}", cache_policy=NO_CACHE)(stages.export)


def trained(context: RunContext, stage: str) -> None:
    """One stage: its training, and its weights on the disk."""
    train(context, stage)
    export(context, stage)


FLOWS = {kind: flow(name=kind, flow_run_name="{context.run}-{stage}", validate_parameters=False)(trained) for kind in ("sft", "rl")}
"""By kind of stage. One name each, so that Prefect's pages keep them apart."""

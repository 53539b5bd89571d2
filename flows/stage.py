"""Stages of all kinds."""

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from tasks import stages
from tasks.context import RunContext
from tasks.stage_config import KINDS

run_stage = task(name="stage", task_run_name="stage {name}", cache_policy=NO_CACHE)(stages.run_stage)


def stage(context: RunContext, name: str) -> None:
    """One stage of the recipe."""
    run_stage(context, name)


FLOWS = {kind: flow(name=kind, flow_run_name="{context.run}-{name}", validate_parameters=False)(stage) for kind in KINDS}
"""By kind of stage. One name each, so that Prefect's pages keep them apart."""

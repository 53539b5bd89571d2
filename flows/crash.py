"""What is written down when a run's process was killed, which could not do so itself."""

import logging
from typing import Any, TypedDict

from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import FlowStateHook

from tasks import record

logger = logging.getLogger(__name__)


def note_death(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Prefect calls it in the worker. Record and MLflow say that the run of this flow run was killed, and why.

    One that has ended in order said so itself, and keeps what it said.
    """
    for found in record.loadable().values():
        if found.flow_run == str(flow_run.id) and found.status == "killed":
            from tasks.mlflow_writer import end_killed

            end_killed(found, state.message or state.name or "killed")
            logger.info("%s was killed: %s", found.run, state.message)


class _Hooks(TypedDict):
    on_crashed: list[FlowStateHook[..., Any]]
    on_cancellation: list[FlowStateHook[..., Any]]


HOOKS = _Hooks(on_crashed=[note_death], on_cancellation=[note_death])
"""Of every flow that a worker may start."""

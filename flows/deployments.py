"""What Prefect is told of the flows: `prefect.yaml`, made from conf/recipe (`python -m flows.deployments` writes it anew), and `almanac deploy`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, get_args

import yaml

from flows.parameters import DevicePool, pool_of
from tasks import workspace
from tasks.compose import choices, compose
from tasks.stage_config import KINDS

if TYPE_CHECKING:
    from prefect.events.schemas.automations import AutomationCore

FILE = "prefect.yaml"
TAG = "almanac"
"""Of every deployment that comes from here."""
HEADER = """\
# Flows as Prefect's deployments: `almanac deploy` sends them to the server, after `almanac up`. Made from conf/recipe by `make docs`.
"""
ADDRESS = "http://127.0.0.1:4200/api"
"""Where `almanac up` starts Prefect's server, if nothing else is said."""
POOLS: tuple[DevicePool, ...] = get_args(DevicePool)
HOUR = 3600
MOST_SECONDS = {"cpu": 4 * HOUR, "gpu": 14 * 24 * HOUR}
"""A run that takes longer is stopped: the longest of the small recipes takes half an hour, of the published ones some days."""
NIGHTS = {"cpu": ("0 2 * * *", 4 * HOUR, "every night"), "gpu": ("0 2 * * 6", 48 * HOUR, "every Saturday")}
"""Schedule, budget in seconds, and the schedule in words."""
EXAMPLE = {"cpu": "polaris_tiny", "gpu": "polaris_qwen3_4b"}
"""Recipe that a deployment of a single part is about, where the person who starts it names no other."""
PARTS = {
    "data": "A recipe's model and data, made and checked",
    "evaluation": "Accuracy before and after the stages of a recipe, as they lie ready",
    **{kind: f"One stage of kind {kind}, where the stages before it lie ready" for kind in KINDS},
}
ZOMBIES = "crash zombies"
HEARTBEATS_SECONDS = 300
"""A flow run that says nothing for so long has lost its process and its worker; it says something every half minute."""


class DeploymentError(RuntimeError):
    """Prefect does not take the deployments."""


def document() -> dict[str, Any]:
    """The whole of prefect.yaml."""
    # Where it is called from, which `prefect deploy` itself asks of whoever deploys.
    pull = [{"prefect.deployments.steps.set_working_directory": {"directory": "{{ $PWD }}"}}]
    return {"name": "almanac", "pull": pull, "deployments": [*_recipes(), *_parts(), *_nights()]}


def text() -> str:
    """What the file holds."""
    return HEADER + yaml.safe_dump(document(), sort_keys=False, width=150)


def _recipes() -> Iterator[dict[str, Any]]:
    for name in choices("recipe"):
        config = compose([f"recipe={name}"])
        pool = pool_of(config)
        parameters = {"recipe": name, "overrides": [], "fresh": False, "until": None, "timeout_seconds": MOST_SECONDS[pool]}
        yield _deployment("recipe", name, pool, config.description, parameters)


def _parts() -> Iterator[dict[str, Any]]:
    for pool in POOLS:
        written = compose([f"recipe={EXAMPLE[pool]}"]).stages
        # The first of each kind.
        stages: dict[str, str] = {stage.kind: name for name, stage in reversed(written.items())}
        for flow, what in PARTS.items():
            parameters: dict[str, Any] = {"recipe": EXAMPLE[pool]}
            if flow in KINDS:
                parameters["stage"] = stages.get(flow, flow)
            if flow == "evaluation":
                parameters["label"] = list(written)[-1]
            parameters |= {"overrides": [], "timeout_seconds": MOST_SECONDS[pool]}
            yield _deployment(flow, pool, pool, what, parameters)


def _nights() -> Iterator[dict[str, Any]]:
    for pool in POOLS:
        cron, budget, when = NIGHTS[pool]
        what = f"Recipes for {pool} devices that have a reference, run {when} and judged beside it"
        night = _deployment("nightly", pool, pool, what, {"budget_seconds": budget, "names": [], "devices": pool, "next_stage": False})
        # A night that is still on is the one; the next is not kept for later.
        night["concurrency_limit"] = {"limit": 1, "collision_strategy": "CANCEL_NEW"}
        yield night | {"schedules": [{"cron": cron, "timezone": "UTC", "active": True}]}


def _deployment(flow: str, name: str, pool: DevicePool, what: str, parameters: dict[str, Any]) -> dict[str, Any]:
    module = "stage" if flow in KINDS else flow
    return {
        "name": name,
        "entrypoint": f"flows/{module}.py:{flow}",
        "description": what,
        "tags": [TAG, flow, pool],
        "parameters": parameters,
        "work_pool": {"name": pool},
        "concurrency_limit": {"limit": 1, "collision_strategy": "ENQUEUE"},
    }


def deploy() -> tuple[list[str], list[str]]:
    """Sends the deployments to the server at PREFECT_API_URL, or else where `almanac up` has it.

    Returns their names, and the names of those that were taken away there: sent from this checkout before, and not in the file any more.

    Raises:
        ConfigurationError: the file is not what conf/recipe says.
        DeploymentError: no server answers, or Prefect refuses.
    """
    path = workspace.checkout() / FILE
    if not path.is_file() or path.read_text(encoding="utf-8") != text():
        raise ValueError(f"{path} is not what conf/recipe says; write it anew with `python -m flows.deployments`")
    address = os.environ.get("PREFECT_API_URL") or ADDRESS
    if not answers(address):
        raise DeploymentError(f"no Prefect server answers at {address}; start one with `almanac up`, or set PREFECT_API_URL")
    prepare_server(address)
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", FILE]
    environment = os.environ | {"PREFECT_API_URL": address, "PWD": str(workspace.checkout())}
    done = subprocess.run(command, cwd=workspace.checkout(), env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeploymentError(f"`prefect deploy` ended with exit code {done.returncode}:\n{(done.stdout + done.stderr).strip()}")
    names = [f"{one['tags'][1]}/{one['name']}" for one in document()["deployments"]]
    return names, _settle(address, names)


def answers(address: str) -> bool:
    """Whether a Prefect server is there."""
    import httpx

    try:
        return httpx.get(f"{address}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


def prepare_server(address: str) -> None:
    """Makes the work pools, of one run at a time each, and the automation that ends runs whose process and worker are both gone."""
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    with SyncPrefectClient(address) as client:
        for pool in POOLS:
            template = ProcessWorker.get_default_base_job_template()
            wanted = WorkPoolCreate(name=pool, type="process", concurrency_limit=1, base_job_template=template, description=f"runs on {pool} devices")
            with suppress(ObjectAlreadyExists):
                client.create_work_pool(wanted)
        if client.find_automation(ZOMBIES) is None:
            client.create_automation(_zombies())


def _zombies() -> "AutomationCore":
    """Of a flow run whose process dies the worker says so, but not of one whose worker died with it: that would run for ever."""
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
    from prefect.events.schemas.events import ResourceSpecification

    states = ("heartbeat", "Completed", "Failed", "Cancelled", "Crashed")
    return AutomationCore(
        name=ZOMBIES,
        description="marks flow runs as crashed whose process and worker are both gone",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            after={"prefect.flow-run.heartbeat"},
            expect={f"prefect.flow-run.{state}" for state in states},
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            for_each={"prefect.resource.id"},
            threshold=1,
            within=timedelta(seconds=HEARTBEATS_SECONDS),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="nothing was heard of it: its process and its worker are gone")],
    )


def _settle(address: str, names: list[str]) -> list[str]:
    """Deployments of ours take no parameter that they do not know, and those that are not among `names` any more go. Returns the names of these.

    Ours are those that bear the tag and whose runs work in this checkout: another checkout's, or a person's own with that tag, are left alone.
    """
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import DeploymentUpdate
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags

    tagged, here, gone = DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG])), str(workspace.checkout()), []
    with SyncPrefectClient(address) as client:
        flows = {flow.id: flow.name for flow in client.read_flows(deployment_filter=tagged, limit=200)}
        for found in client.read_deployments(deployment_filter=tagged, limit=200):
            name = f"{flows.get(found.flow_id)}/{found.name}"
            if name in names:
                # Prefect's command asks for this itself; whoever calls its API would get a run that fails.
                closed = {**(found.parameter_openapi_schema or {}), "additionalProperties": False}
                client.update_deployment(found.id, DeploymentUpdate(parameter_openapi_schema=closed))
            elif here in [step.get("directory") for entry in found.pull_steps or [] for step in entry.values()]:
                client.delete_deployment(found.id)
                gone.append(name)
    return gone


def main() -> None:
    """Writes the file anew."""
    path = workspace.checkout() / FILE
    path.write_text(text(), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()

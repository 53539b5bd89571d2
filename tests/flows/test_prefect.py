"""Flows as deployments, on the real parts: `almanac up` with Prefect's server, a worker and MLflow, and `prefect` as a person types it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from small_recipe import SMALL, Almanac
from synthetic_runs import store
from waiting import wait_for

from flows.deployments import TAG, ZOMBIES
from tasks import workspace

OVERRIDES = [setting for setting in SMALL if not setting.startswith(("recipe=", "resources="))] + ["resources=one_cpu", "data.quality=off"]
RECIPE = [*OVERRIDES, "stages.sft.steps=60"]

PATIENCE = 150
"""Seconds for one request: Prefect's server waits up to a minute for SQLite's lock."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Up:
    """`almanac up` in a process, under a root of its own."""

    def __init__(self, root: Path) -> None:
        self.port, self.mlflow_port = free_port(), free_port()
        self.api = f"http://127.0.0.1:{self.port}/api"
        # A worker that looks every five seconds, not every ten: the tests wait for it.
        self.almanac = Almanac(root, {"PREFECT_API_URL": self.api, "PREFECT_WORKER_QUERY_SECONDS": "5", "ALMANAC_ROOT": str(root)})
        self.output = root / "up.txt"
        with self.output.open("w") as output:
            command = self.almanac.command("up", "--prefect-port", str(self.port), "--mlflow-port", str(self.mlflow_port))
            self.process = subprocess.Popen(command, env=self.almanac.environment(), stdout=output, stderr=subprocess.STDOUT, text=True)

    def wait(self) -> None:
        wait_for("almanac up", lambda: "Ctrl-C stops everything" in self.output.read_text() or self.process.poll() is not None, 300)
        assert self.process.poll() is None, self.output.read_text()

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def prefect(self, *arguments: str, timeout: float = 500) -> subprocess.CompletedProcess[str]:
        """As a person types it, who has followed what `almanac up` says."""
        assert f"export PREFECT_API_URL={self.api}" in self.output.read_text()
        command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        # Anywhere: the flows are found all the same.
        return subprocess.run(
            command, cwd=self.almanac.root, env=self.almanac.environment(), capture_output=True, text=True, timeout=timeout, check=False
        )

    def start(self, deployment: str, **parameters: Any) -> str:
        """As a program does it. Returns the flow run's id."""
        # Prefect's own client asks again where its server is busy.
        with SyncPrefectClient(self.api) as client:
            return str(client.create_flow_run_from_deployment(self.deployment(deployment)["id"], parameters=parameters).id)

    def deployment(self, name: str) -> dict[str, Any]:
        return httpx.get(f"{self.api}/deployments/name/{name}", timeout=PATIENCE).json()

    def flow_run(self, name: str) -> dict[str, Any]:
        return httpx.get(f"{self.api}/flow_runs/{name}", timeout=PATIENCE).json()

    def ended(self, name: str, seconds: float = 500) -> dict[str, Any]:
        ends = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        wait_for(f"end of {name}", lambda: self.flow_run(name)["state_type"] in ends, seconds)
        return self.flow_run(name)

    def all(self, what: str, **asked: Any) -> list[dict[str, Any]]:
        return httpx.post(f"{self.api}/{what}/filter", json=asked, timeout=PATIENCE).json()

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.almanac.root.glob(".work/runs/*/record.json"))]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    up = Up(tmp_path_factory.mktemp("root"))
    try:
        up.wait()
        yield up
    finally:
        family = up.family() if up.process.poll() is None else []
        up.process.terminate()
        up.process.wait(300)
        # Mutation: stop the workers before what they run, or leave out the sweep over descendants.
        left = psutil.wait_procs(family, timeout=PATIENCE)[1]
        for process in left:
            process.kill()
    assert not left, f"outlived almanac up: {left}"
    assert up.process.returncode == 0, up.output.read_text()
    assert up.output.read_text().endswith("stopped\n")


@pytest.fixture(scope="module")
def deployed(up: Up) -> Up:
    """After others have deployed flows with our tag, and we one that is in the file no more."""
    with SyncPrefectClient(up.api) as client:
        flow = client.create_flow_from_name("recipe")
        for name, directory in {"of_before": workspace.checkout(), "of_another_checkout": up.almanac.root, "of_a_person": None}.items():
            pull = [{"prefect.deployments.steps.set_working_directory": {"directory": str(directory)}}] if directory else None
            client.create_deployment(flow, name, tags=[TAG], pull_steps=pull)
    done = up.almanac("deploy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"recipe/grpo_tiny", "data/cpu", "rl/cpu", "nightly/gpu"} <= set(done.stdout.split())
    assert [line for line in done.stdout.splitlines() if "taken away" in line] == [
        "taken away: recipe/of_before, sent from here before and not in prefect.yaml any more"
    ]
    return up


def test_everything_answers_and_is_quiet(up: Up) -> None:
    assert httpx.get(f"http://127.0.0.1:{up.mlflow_port}/health").text == "OK"
    # To this machine alone: Mutation: --host 0.0.0.0.
    listening = {connection.laddr.ip for process in up.family() for connection in process.net_connections("inet") if connection.status == "LISTEN"}
    assert listening == {"127.0.0.1"}
    assert ZOMBIES in [automation["name"] for automation in up.all("automations")]
    pools = {pool["name"]: pool["concurrency_limit"] for pool in up.all("work_pools")}
    assert (pools["cpu"], pools["gpu"]) == (1, 1)
    assert not [line for line in (up.almanac.root / ".work/up/prefect-server.log").read_text().splitlines() if "telemetry" in line]


def test_only_what_was_sent_from_here_before_is_taken_away(deployed: Up) -> None:
    """Mutation: ask for the tag alone, or for no directory."""
    found = {one["name"] for one in deployed.all("deployments") if one["name"].startswith("of_")}
    assert found == {"of_another_checkout", "of_a_person"}


def test_what_a_deployment_does_not_take_is_refused_before_there_is_a_run(deployed: Up) -> None:
    """Mutation: `str` for the recipe, or `_settle` without `additionalProperties`."""
    before = len(deployed.all("flow_runs", flows={"name": {"any_": ["data"]}}))
    done = deployed.prefect("deployment", "run", "data/cpu", "--param", "recipe=grpo_tny")
    assert (done.returncode, "'grpo_tny' is not one of" in done.stdout + done.stderr) == (1, True)
    url = f"{deployed.api}/deployments/{deployed.deployment('data/cpu')['id']}/create_flow_run"
    answer = httpx.post(url, json={"parameters": {"recipe": "grpo_tiny", "seeed": 1}}, timeout=PATIENCE)
    assert (answer.status_code, "'seeed' was unexpected" in answer.text) == (409, True)
    assert len(deployed.all("flow_runs", flows={"name": {"any_": ["data"]}})) == before


def test_a_run_that_a_person_starts_is_waited_for_and_leaves_small_results(deployed: Up) -> None:
    done = deployed.prefect(
        "deployment", "run", "data/cpu", "--param", "recipe=grpo_tiny", "--param", f"overrides={json.dumps(OVERRIDES)}", "--watch"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = deployed.records()
    assert (record["status"], record["recipe"], record["stages"]) == ("finished", "grpo_tiny", [])
    run = deployed.flow_run(record["flow_run"])
    assert (run["name"], run["state_type"]) == (record["run"], "COMPLETED")
    # Where they lie and by what they are found; Mutation: return the data themselves.
    results = {path.stem: json.loads(path.read_text()) for path in deployed.almanac.root.glob(f".prefect/storage/{run['id']}/*.json")}
    assert set(results) == {"create model", "prepare data"}
    data = json.loads(results["prepare data"]["result"])
    lineage = json.loads((deployed.almanac.root / ".work" / "runs" / record["run"] / "lineage.json").read_text())
    assert data == {
        "what": "data",
        "where": str(deployed.almanac.root / "data" / "grpo_tiny"),
        "fingerprint": lineage["dataset_digests"],
    }
    log = "\n".join(line["message"] for line in deployed.all("logs", logs={"flow_run_id": {"any_": [run["id"]]}}))
    assert "prepare data: done in" in log
    (link,) = [artifact for artifact in deployed.all("artifacts") if artifact["key"] == "grpo-tiny-mlflow"]
    assert f"http://127.0.0.1:{deployed.mlflow_port}/" in link["data"]
    assert record["mlflow"]["run_id"] in link["data"]


def test_bad_settings_fail_the_run_and_the_command_with_their_reason(deployed: Up) -> None:
    done = deployed.prefect("deployment", "run", "data/cpu", "--param", 'overrides=["data.chain_sum.max_trms=2"]', "--watch")
    assert done.returncode == 1
    (failed,) = [run for run in deployed.all("flow_runs", flows={"name": {"any_": ["data"]}}) if run["state_type"] == "FAILED"]
    assert "data.chain_sum.max_trms" in failed["state"]["message"]
    assert len(deployed.records()) == 1


def test_a_schedule_fires(deployed: Up) -> None:
    """Prefect's scheduler dies with SQLAlchemy 2.1, and nothing warns. Mutation: that package."""
    # No worker is there to run it: the other tests go on undisturbed.
    entry = deployed.deployment("data/gpu")["id"]
    schedule = {"active": True, "schedule": {"cron": "* * * * *", "timezone": "UTC"}}
    made = httpx.post(f"{deployed.api}/deployments/{entry}/schedules", json=[schedule], timeout=PATIENCE).json()

    def scheduled() -> bool:
        return any(run["auto_scheduled"] for run in deployed.all("flow_runs", deployments={"id": {"any_": [entry]}}))

    wait_for("an auto-scheduled run", scheduled, 90)
    httpx.delete(f"{deployed.api}/deployments/{entry}/schedules/{made[0]['id']}", timeout=PATIENCE)


@pytest.mark.timeout(1200)
def test_a_killed_recipe_says_so_and_goes_on_at_the_stage_that_was_killed(deployed: Up) -> None:
    """Mutations: no hook (MLflow says RUNNING); a new fingerprint for each attempt (sft is made again)."""
    from mlflow import MlflowClient

    flow_run = deployed.start("recipe/grpo_tiny", overrides=RECIPE)

    def rl_has_begun() -> dict[str, Any] | None:
        found = [record for record in deployed.records() if record["flow_run"] == flow_run]
        return found[0] if found and found[0]["stages"][-1]["status"] == "running" else None

    first = wait_for("the RL stage", rl_has_begun, 500)
    os.kill(first["process"]["pid"], signal.SIGKILL)
    assert deployed.ended(flow_run, 120)["state_type"] == "CRASHED"
    client = MlflowClient(first["mlflow"]["tracking_uri"])

    def noted() -> Any:
        found = client.get_run(first["mlflow"]["run_id"])
        return found if found.info.status != "RUNNING" else None

    dead = wait_for("MLflow's word of the death", noted, 60)
    assert (dead.info.status, "-9" in dead.data.tags["almanac.error"]) == ("KILLED", True)
    assert dead.data.tags["prefect.flow_run_id"] == flow_run
    shown = json.loads(deployed.almanac("show", first["run"], "--json").stdout)
    assert (shown["status"], "-9" in shown["error"]) == ("killed", True)

    assert deployed.prefect("flow-run", "retry", flow_run).returncode == 0
    wait_for("the retry", lambda: deployed.flow_run(flow_run)["state_type"] not in ("CRASHED",), 60)
    again = deployed.ended(flow_run)
    assert (again["state_type"], again["run_count"]) == ("COMPLETED", 2)
    second = next(record for record in deployed.records() if record["flow_run"] == flow_run and record["run"] != first["run"])
    assert [stage["reused_from"] for stage in second["stages"]] == [first["run"], None]
    assert second["status"] == "finished"

    tables = [artifact for artifact in deployed.all("artifacts/latest") if artifact["type"] == "table"]
    rows = {artifact["key"]: json.loads(artifact["data"])[0] for artifact in tables}
    assert set(rows) == {"grpo-tiny-sft", "grpo-tiny-rl"}
    # Mutation: make them in flows within the recipe's; the page of the run would show nothing of them.
    assert {table["flow_run_id"] for table in tables} == {flow_run}
    assert (rows["grpo-tiny-sft"]["made by"], rows["grpo-tiny-rl"]["steps"]) == (first["run"], "2 of 2")
    assert re.fullmatch(r"[\d.]+ \[[\d.]+, [\d.]+\]", rows["grpo-tiny-rl"]["accuracy after"])


def test_one_part_of_a_recipe_uses_what_lies_ready(deployed: Up) -> None:
    """Runs after the recipe. Mutation: the parts fingerprint another way."""
    flow_run = deployed.start("evaluation/cpu", recipe="grpo_tiny", label="rl", overrides=RECIPE)
    assert deployed.ended(flow_run)["state_type"] == "COMPLETED"
    record = next(record for record in deployed.records() if record["flow_run"] == flow_run)
    assert all(stage["reused_from"] for stage in record["stages"])
    assert record["stages"][-1]["gain"] is not None


def test_a_night_begins_by_itself_over_all_references(deployed: Up) -> None:
    """Mutation: `names` only; or the references of the other pool. The references take longer than the night has, so that nothing is run."""
    store(deployed.almanac.root, "endless", seconds=1e6)
    flow_run = deployed.start("nightly/cpu", budget_seconds=10)
    assert deployed.ended(flow_run)["state_type"] == "COMPLETED"
    (night,) = [artifact for artifact in deployed.all("artifacts") if artifact["key"] == "night"]
    assert "| endless | insufficient | not started | a run takes 1000000 s" in night["data"]
    assert list((deployed.almanac.root / ".work" / "nightly").glob("*/report.html"))


def test_when_one_service_dies_the_others_end_and_the_command_says_which(tmp_path: Path) -> None:
    """Mutation: look at the first service only; or leave the others running."""
    up = Up(tmp_path)
    try:
        up.wait()
        family = up.family()
        mlflow = next(process for process in family if "mlflow" in process.cmdline() and "server" in process.cmdline())
        mlflow.kill()
        assert up.process.wait(120) == 1
    finally:
        up.process.kill()
    assert re.search(r"almanac: mlflow ended by itself with exit code -9; its log is \S+mlflow\.log", up.output.read_text())
    assert not psutil.wait_procs(family, timeout=PATIENCE)[1]

"""`almanac up`: Prefect's server, workers and MLflow's pages, on this machine alone, started together and stopped together."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from flows import deployments
from flows.artifacts import MLFLOW_PAGES
from flows.family import end, family
from flows.parameters import DevicePool
from tasks import workspace
from tasks.answering import answers
from tasks.show import check_port, mlflow_server
from tasks.tracker_location import tracking_uri

START_SECONDS = 180.0
"""How long a service may take to answer for the first time."""
RUN_STOP_SECONDS = 120.0
"""How long a flow run that is told to stop may take to write its records."""
SERVICE_STOP_SECONDS = 15.0
LOG_BYTES = 10 * 2**20
"""Of a log file, before it is begun anew; the one before is kept. Prefect's server writes ten thousands of lines an hour on SQLite."""


class ServiceError(RuntimeError):
    """A service did not start, or has ended; names it and its log."""


@dataclass
class Service:
    """One process with its descendants."""

    name: str
    process: subprocess.Popen[str]
    log: Path

    def check(self) -> None:
        """Raises `ServiceError` where the process has ended."""
        if (code := self.process.poll()) is not None:
            raise ServiceError(f"{self.name} ended by itself with exit code {code}; its log is {self.log}")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a browser finds them, and what `prefect` has to be told."""

    prefect: str
    api: str
    mlflow: str
    pools: Sequence[DevicePool]


@contextlib.contextmanager
def running(prefect_port: int, mlflow_port: int) -> Iterator[tuple[Addresses, list[Service]]]:
    """The services, once all of them answer; however the block ends, they end with it, and the flow runs of the workers in order before them.

    Raises:
        ValueError: a port is taken.
        ServiceError: a service does not start.
    """
    check_port(prefect_port, "--prefect-port")
    uri = tracking_uri()
    own_mlflow = not uri.startswith(("http://", "https://"))
    if own_mlflow:
        check_port(mlflow_port, "--mlflow-port")
    prefect, mlflow = f"http://127.0.0.1:{prefect_port}", f"http://127.0.0.1:{mlflow_port}" if own_mlflow else uri
    addresses = {"PREFECT_API_URL": f"{prefect}/api", "PREFECT_UI_API_URL": f"{prefect}/api", MLFLOW_PAGES: mlflow}
    environment = os.environ | addresses
    services: list[Service] = []
    with _follower() as follow:
        try:
            server = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(prefect_port)]
            services.append(_start("prefect-server", server, environment, follow))
            if own_mlflow:
                services.append(_start("mlflow", mlflow_server(uri, mlflow_port), environment, follow))
            _wait(f"{prefect}/api/health", services)
            deployments.prepare_server(f"{prefect}/api")
            pools = _pools()
            for pool in pools:
                services.append(_start(f"worker-{pool}", worker(pool), environment, follow))
            _wait_for_workers(f"{prefect}/api", pools, services)
            if own_mlflow:
                _wait(f"{mlflow}/health", services)
            yield Addresses(prefect, f"{prefect}/api", mlflow, pools), services
        finally:
            _stop(services)


def logs() -> Path:
    """Where what the services print goes."""
    return workspace.work_directory() / "up"


def until_stopped(services: Sequence[Service]) -> None:
    """Returns after Ctrl-C or SIGTERM.

    Raises:
        ServiceError: a service has ended by itself.
    """
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            for service in services:
                service.check()
            time.sleep(0.5)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM, and the end of the terminal, are as Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def worker(pool: DevicePool) -> list[str]:
    """The command of a worker."""
    return [sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", "--pool", pool, "--type", "process", "--name", f"almanac-{pool}"]


def _pools() -> list[DevicePool]:
    from engine import hardware

    return list(deployments.POOLS) if hardware.gpus() else ["cpu"]


def _start(name: str, command: Sequence[str], environment: Mapping[str, str], follow: IO[str]) -> Service:
    log = logs() / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # A session of its own: Ctrl-C reaches us alone, and we say in which order they end.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        cwd=workspace.checkout(),
        env=environment,
    )
    print(process.pid, file=follow, flush=True)
    threading.Thread(target=_keep, args=(process.stdout, log), daemon=True).start()
    return Service(name, process, log)


def _keep(lines: IO[str], log: Path) -> None:
    handler = RotatingFileHandler(log, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
    for line in lines:
        handler.emit(logging.LogRecord("", logging.INFO, "", 0, line.rstrip("\n"), None, None))
    handler.close()


@contextlib.contextmanager
def _follower() -> Iterator[IO[str]]:
    """A process that is told of every service. When this one is killed, its pipe breaks, and it ends them and all that they have started."""
    child = subprocess.Popen([sys.executable, "-m", "flows.family"], stdin=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdin is not None
    try:
        yield child.stdin
    finally:
        # By now nothing of them is left; it looks, and ends.
        child.stdin.close()
        child.wait()


def _wait(url: str, services: Sequence[Service]) -> None:
    def check() -> None:
        for service in services:
            service.check()

    if not answers(url, START_SECONDS, check):
        raise ServiceError(f"{url} does not answer within {START_SECONDS:.0f} s; the logs are in {services[0].log.parent}")


def _wait_for_workers(address: str, pools: Sequence[DevicePool], services: Sequence[Service]) -> None:
    from prefect.client.orchestration import SyncPrefectClient

    started = time.time()
    deadline = time.monotonic() + START_SECONDS
    waiting = set(pools)
    with SyncPrefectClient(address) as client:
        while waiting:
            for service in services:
                service.check()
            if time.monotonic() > deadline:
                raise ServiceError(f"no worker of {', '.join(waiting)} within {START_SECONDS:.0f} s; the logs are in {services[0].log.parent}")
            for pool in list(waiting):
                beats = [found.last_heartbeat_time for found in client.read_workers_for_work_pool(pool)]
                if any(beat is not None and beat.timestamp() >= started for beat in beats):
                    waiting.remove(pool)
            time.sleep(0.5)


def _stop(services: Sequence[Service]) -> None:
    """Flow runs first, each told once, while the server still hears how they end; then the workers, and what they report to last."""
    workers = [service for service in services if service.name.startswith("worker-")]
    end([member for service in workers for member in family(service.process.pid) if _runs_a_flow(member)], RUN_STOP_SECONDS)
    for service in reversed(services):
        members = family(service.process.pid)
        with contextlib.suppress(ProcessLookupError):
            service.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            service.process.wait(SERVICE_STOP_SECONDS)
        end([member for member in members if member.is_running()], SERVICE_STOP_SECONDS)
        service.process.wait()


def _runs_a_flow(process: psutil.Process) -> bool:
    try:
        return "prefect.engine" in process.cmdline()
    except psutil.NoSuchProcess:
        return False

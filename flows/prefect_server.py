"""Prefect's temporary server, for runs that are told of no other.

Prefect would start one at the first flow and wait for it. This one starts while the run imports what it needs.
"""

import atexit
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import prefect
from prefect.context import refresh_global_settings_context
from prefect.settings import get_current_settings

from tasks.answering import answers

END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Server:
    """What this process, and those that it starts, report to."""

    api: str
    """Address of its API."""
    process: "subprocess.Popen[bytes] | None"
    """None where it is not ours."""

    def wait(self) -> None:
        """Returns when it answers.

        Raises:
            RuntimeError: it has ended, or does not answer in time.
        """
        seconds = get_current_settings().server.ephemeral.startup_timeout_seconds
        if self.process is not None and not answers(f"{self.api}/health", seconds, self._check):
            raise RuntimeError(f"Prefect's temporary server does not answer within {seconds} s")

    def _check(self) -> None:
        if self.process is not None and self.process.poll() is not None:
            raise RuntimeError(f"Prefect's temporary server ended with exit code {self.process.returncode} instead of starting")


def start_server() -> Server:
    """Starts the temporary server where Prefect's settings name no other. It lives as long as this process."""
    if (api := get_current_settings().api.url) is not None:
        return Server(api, None)
    port = _free_port()
    api = f"http://127.0.0.1:{port}/api"
    # As Prefect starts it itself: without pages, and without the services that only deployments need.
    environment = os.environ | {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    factory = ["--app-dir", str(Path(prefect.__file__).parent), "--factory", "prefect.server.api.server:create_app", "--lifespan", "on"]
    command = [sys.executable, "-m", "uvicorn", *factory, "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    # A session of its own: Ctrl-C goes to every process of the terminal, and the server lives on, to be told how the flows ended.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    # When this process is killed, the pipe breaks.
    follow = f"cat > /dev/null; kill {process.pid} 2> /dev/null"
    follower = subprocess.Popen(["sh", "-c", follow], stdin=subprocess.PIPE, start_new_session=True)
    # Functions that are registered later, as Prefect's own that send what is still to be sent, are called before.
    atexit.register(_end, process, follower)
    os.environ["PREFECT_API_URL"] = api
    refresh_global_settings_context()
    return Server(api, process)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _end(server: "subprocess.Popen[bytes]", follower: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    try:
        server.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    assert follower.stdin is not None
    follower.stdin.close()
    follower.wait()

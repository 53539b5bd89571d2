"""Prefect's temporary server, for runs without PREFECT_API_URL."""

import os
import signal
import subprocess

from prefect.client.orchestration import get_client
from prefect.server.api.server import SubprocessASGIServer

_followers: list[subprocess.Popen[bytes]] = []
"""Kept so that their pipes stay open as long as this process lives."""


def start_server() -> None:
    """Starts the temporary server where no other one is set; Prefect would do so at the first flow, and keeps it until the process ends.

    Raises:
        RuntimeError: it does not answer in time.
    """
    # Ctrl-C goes to every process of the terminal. The server inherits this mask and lives on, to be told how the flows ended.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        get_client(sync_client=True)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    server = SubprocessASGIServer().server_process
    if server is not None:
        # Prefect stops its server when this process ends in order. When it is killed, the pipe breaks all the same.
        follow = f"cat > /dev/null; kill {server.pid} 2> /dev/null"
        _followers.append(subprocess.Popen(["sh", "-c", follow], stdin=subprocess.PIPE, start_new_session=True))


def address() -> str:
    """Of the server that this process reports to, once it is started: for processes that are to report there too."""
    return os.environ.get("PREFECT_API_URL") or SubprocessASGIServer().api_url

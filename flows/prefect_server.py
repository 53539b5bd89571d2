"""Prefect's temporary server, for runs without PREFECT_API_URL."""

import signal

from prefect.client.orchestration import get_client


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

"""`almanac up` and `almanac deploy`: their arguments, and what they print."""

import argparse
import os
from collections.abc import Callable


def add(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds both verbs by the command's own `verb`."""
    started = verb("up", up, "start Prefect's server, a worker and MLflow's pages on this machine; Ctrl-C stops them all")
    started.add_argument("--prefect-port", type=int, default=4200, metavar="PORT", help="default 4200")
    started.add_argument("--mlflow-port", type=int, default=5000, metavar="PORT", help="default 5000")
    verb("deploy", deploy, "send the flows, with their schedules, to Prefect's server (prefect.yaml)")


def up(arguments: argparse.Namespace) -> int:
    """`almanac up`: until Ctrl-C or SIGTERM; 1 when a service ends by itself."""
    from flows import services

    with services.interruptible():
        print(f"starting Prefect, a worker and MLflow; their logs are in {os.path.relpath(services.logs())}", flush=True)
        with services.running(arguments.prefect_port, arguments.mlflow_port) as (addresses, started):
            print(f"Prefect   {addresses.prefect}")
            print(f"MLflow    {addresses.mlflow}")
            print(f"workers   {', '.join(addresses.pools)}")
            print(f"for other terminals: export PREFECT_API_URL={addresses.api}")
            print("`almanac deploy` sends the flows there. Ctrl-C stops everything.", flush=True)
            services.until_stopped(started)
    print("stopped")
    return 0


def deploy(arguments: argparse.Namespace) -> int:
    """`almanac deploy`."""
    from flows import deployments

    names, gone = deployments.deploy()
    for name in names:
        print(name)
    for name in gone:
        print(f"taken away: {name}, sent from here before and not in {deployments.FILE} any more")
    return 0

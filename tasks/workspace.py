"""Where things lie: the project's root, its directories, and the environment that keeps every library local and quiet."""

import os
from pathlib import Path


def checkout() -> Path:
    """Directory that holds `conf/` and the code."""
    return Path(__file__).resolve().parents[1]


def root() -> Path:
    """Directory that data, runs and records go to: ALMANAC_ROOT where it is set, else the checkout."""
    return Path(os.environ.get("ALMANAC_ROOT") or checkout()).expanduser().resolve()


def conf_directory() -> Path:
    """Hydra's groups; always those of the checkout."""
    return checkout() / "conf"


def data_directory(name: str) -> Path:
    """Prepared splits of the data set `name`."""
    return root() / "data" / name


def quality_directory(name: str) -> Path:
    """What was found out about the versions of the data set `name`, one directory for each."""
    return root() / "data" / f"{name}.quality"


def artifacts_directory() -> Path:
    """MLflow's artifacts, where no tracking server says otherwise."""
    return root() / "mlruns"


def work_directory() -> Path:
    """Everything that can be made again or that belongs to this machine: runs, models, locks. Git ignores it."""
    return root() / ".work"


def runs_directory() -> Path:
    """One directory for each run."""
    return work_directory() / "runs"


def run_directory(run: str) -> Path:
    """Record, events, log and worker logs of the run with id `run`."""
    return runs_directory() / run


def stages_directory() -> Path:
    """Outputs of stages and evaluations, by recipe, name and what they were made from. What is deleted there is made again when it is needed."""
    return work_directory() / "stages"


def models_directory() -> Path:
    """Base models, each under the digest of what it was made from."""
    return work_directory() / "models"


def lock_file() -> Path:
    """Held by the one run that may be going on."""
    return work_directory() / "run.lock"


def quiet_environment() -> None:
    """Keep every library's state under the root, and its usage statistics and update checks off.

    A variable that is already set wins. Call it before Prefect, MLflow, Ray, vLLM or a Hugging Face library is imported: they read it then.
    """
    prefect_home = Path(os.environ.get("PREFECT_HOME") or root() / ".prefect")
    quiet = {
        "PREFECT_HOME": str(prefect_home),
        # Prefect keeps results under ~/.prefect whatever PREFECT_HOME says.
        "PREFECT_LOCAL_STORAGE_PATH": str(prefect_home / "storage"),
        "PREFECT_MEMO_STORE_PATH": str(prefect_home / "memo_store.toml"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # Seconds between signs of life of a flow run (`crash zombies`, flows/deployments.py). Its end waits for them up to a second, and so would
        # the end of every flow within a flow.
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        # The default of 20 s is too short for the first start on a slow machine.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        # MLflow takes only the word `true`; Prefect takes it too.
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Seven helper processes of 210 MB each, for a feature that we do not use.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "DVC_NO_ANALYTICS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Else Ray packs and uploads the project when the driver was started by `uv run`.
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    for name, value in quiet.items():
        os.environ.setdefault(name, value)

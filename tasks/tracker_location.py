"""Which MLflow a run reports to, and whether it can be written. Imports no MLflow: `preflight` and `show` stay quick."""

import os
import tempfile
from pathlib import Path

from tasks import workspace
from tasks.config import RecipeConfig

SQLITE = "sqlite:///"


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI where it is set, else the database at the root, by its absolute path: a relative one follows `chdir`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{workspace.root() / 'mlflow.db'}"


def database_file(uri: str) -> Path | None:
    """The file of an SQLite tracking URI; None for every other kind."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) else None


def experiment_name(config: RecipeConfig) -> str:
    """The setting, else MLFLOW_EXPERIMENT_NAME, else the recipe's name."""
    return config.tracking.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or config.name


def check_writable() -> None:
    """Local database and artifacts can be written. A tracking server is not asked: a run goes on without one.

    Raises:
        OSError: `mlruns/` or the database, or the directory around it, refuses; names the path and says what to do.
    """
    database = database_file(tracking_uri())
    if database is None:
        return
    _check_directory(workspace.artifacts_directory())
    _check_directory(database.parent)
    if database.exists():
        try:
            database.open("r+b").close()
        except OSError as error:
            raise _explained(error, database) from error


def _check_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Permission bits say nothing about read-only mounts, full disks and quotas; a byte on the disk does.
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        raise _explained(error, directory) from error


def _explained(error: OSError, path: Path) -> OSError:
    message = (
        f"MLflow's records cannot be written ({error.strerror}); mend the permissions, free disk space, "
        "or set MLFLOW_TRACKING_URI to a tracking server"
    )
    return type(error)(error.errno, message, str(path))

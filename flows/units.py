"""The units of work that flows call: `tasks/stages.py` as Prefect's tasks. Each leaves what it made where it was made, and returns where that is.

Prefect's own cache is not asked: it does not see a changed helper, a changed file behind a path or an output that somebody has deleted. What lies
ready is found by its fingerprint (`tasks/outputs.py`), whoever made it, and is looked at before it is taken.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from flows.watch import current, watcher
from tasks import workspace

if TYPE_CHECKING:  # torch, which those who only deploy need not wait for
    from tasks.outputs import Place

Result = dict[str, Any]
"""Of a unit, small and readable: what it is, where it lies, and by which fingerprint it is found."""

DELAYS = [10.0, 60.0]
"""Seconds before the model is asked for again."""
OFFLINE = {"ConnectionError", "ConnectTimeout", "ReadTimeout", "ConnectError", "LocalEntryNotFoundError", "ChunkedEncodingError"}
"""What the network's libraries raise where another attempt may help, by name: they need not be there."""


def _unit(name: str, run_name: str, **more: Any) -> Callable[[Callable[..., Result]], "Task[..., Result]"]:
    """A task whose result is kept as JSON, and is never read instead of calling it."""
    place = "{flow_run.root_flow_run_id}/{task_run.name}.json"
    kept: dict[str, Any] = {"persist_result": True, "result_serializer": "json", "result_storage_key": place, "refresh_cache": True}
    return task(name=name, task_run_name=run_name, **kept, **more)


@contextmanager
def beside(unit: "Task[[], Result]") -> Iterator[None]:
    """The unit is run while the block is. What it raises is raised at the block's end, whatever the block has raised."""
    running = unit.submit()
    try:
        yield
    finally:
        running.result()


def is_offline(error: BaseException | None) -> bool:
    """Whether the network failed, and not the recipe: an unknown model does not become known."""
    while error is not None:
        if OFFLINE & {kind.__name__ for kind in type(error).__mro__}:
            return True
        error = error.__cause__ or error.__context__
    return False


def _worth_another_attempt(task: "Task[..., Result]", task_run: TaskRun, state: State[Any]) -> bool:
    """Somebody at a terminal hears at once."""
    return watcher() is None and isinstance(state.data, BaseException) and is_offline(state.data)


@_unit("create model", "create model", retries=len(DELAYS), retry_delay_seconds=DELAYS, retry_condition_fn=_worth_another_attempt)
def create_model() -> Result:
    """The weights that the recipe starts from."""
    from tasks import stages

    context = current()
    stages.create_model(context)
    return {"what": "model", "where": str(context.weights.directory), "fingerprint": context.weights.digest}


@_unit("prepare data", "prepare data")
def prepare_data() -> Result:
    """Splits, checked and written."""
    from tasks import stages

    context = current()
    stages.prepare_data(context)
    return {"what": "data", "where": str(context.data.directory), "fingerprint": dict(context.data.digests)}


@_unit("validate data", "validate data")
def validate_data() -> Result:
    """The verdict on the splits."""
    from tasks import stages

    context = current()
    stages.validate_data(context)
    name = context.config.name
    return {"what": "verdict on the data", "where": str(workspace.quality_directory(name)), "fingerprint": dict(context.data.digests)}


@_unit("start engine", "start engine")
def start_engine() -> Result:
    """Ray and the workers, where the first evaluation needs them."""
    from tasks import stages

    context = current()
    stages.start_engine(context)
    return {"what": "engine", "where": str(context.directory), "fingerprint": context.weights.digest}


@_unit("evaluate", "evaluate {label}")
def evaluate(label: str) -> Result:
    """Accuracy of the weights as they are now: of `base`, or after the stage `label`."""
    from tasks import stages

    return _result(f"evaluation {label}", stages.evaluate(current(), label))


@_unit("stage", "stage {name}")
def run_stage(name: str, *, only_kept: bool = False) -> Result:
    """One stage of the recipe; with `only_kept` it has to lie ready."""
    from tasks import stages

    return _result(f"stage {name}", stages.run_stage(current(), name, only_kept=only_kept))


def _result(what: str, place: "Place") -> Result:
    return {"what": what, "where": str(place.directory), "fingerprint": place.fingerprint}

"""Which prompts training got too easy, by the log of what they scored at every visit; and that log."""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from engine.events import PromptsScored
from tasks import data
from tasks.prompt_files import write_kept
from tasks.stage_config import GIVEN, DropEasyStageConfig

SCORES = GIVEN["scores"]
"""Log of an RL stage, in its output: a line for each step."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the log says of one prompt."""

    outcome: float
    visits: int


def begin_log(path: Path) -> None:
    """A log without a line. A stage that is run again begins its log anew, so that no step stands in it twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")


def append(path: Path, event: PromptsScored) -> None:
    """A step's line, whole: `step`, and as lists of equal length `prompts` (ids), `outcomes` and `samples`."""
    line = {"step": event.step, "prompts": list(event.prompts), "outcomes": list(event.outcomes), "samples": list(event.samples)}
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps({"stage": event.stage, **line}).encode() + b"\n")


def read(path: Path) -> list[PromptsScored]:
    """The steps of a log, in order.

    Raises:
        ValueError: a line cannot be read, or a step is missing or stands there twice; names file and line.
    """
    events: list[PromptsScored] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            event = PromptsScored(**json.loads(line))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: not a step's scores ({error}); run the stage again") from error
        if event.step != number:
            raise ValueError(f"{path}, line {number}: is of step {event.step}, not {number}; run the stage again")
        events.append(event)
    return events


def estimates(steps: Iterable[PromptsScored], estimator: Literal["mean", "latest"]) -> dict[str, Estimate]:
    """Of every prompt that was visited: `mean` of its outcomes over all visits, or that of the `latest`.

    Args:
        steps: in the order in which they were made.
    """
    visits: dict[str, list[float]] = {}
    for step in steps:
        for prompt, outcome in zip(step.prompts, step.outcomes, strict=True):
            visits.setdefault(prompt, []).append(outcome)
    return {prompt: Estimate(fmean(found) if estimator == "mean" else found[-1], len(found)) for prompt, found in visits.items()}


def easy(found: dict[str, Estimate], threshold: float, min_visits: int) -> set[str]:
    """Ids of the prompts to drop: estimate above `threshold` after at least `min_visits` visits. Prompts that nobody visited are never among them.

    With 8 samples and a threshold of 0.9, one visit drops 8/8 alone, and two visits drop 15/16 (POLARIS).
    """
    return {prompt for prompt, estimate in found.items() if estimate.outcome > threshold and estimate.visits >= min_visits}


def filtered(source: Path, logs: Sequence[Path], config: DropEasyStageConfig, target: Path, above: str = "") -> dict[str, float]:
    """Writes the prompts of the file `source` without the easy ones into the file `target`, and says what it did.

    Args:
        source: prompts, as a data set or a stage gives them.
        logs: of the stages that are looked at, in their order.
        config: threshold, estimator and minimum of visits.
        target: where the rows that are kept go.
        above: what the error puts before the name of a setting.

    Raises:
        DataError: no prompt is left.
        ValueError: a log is incomplete.
    """
    prompts = data.load_prompts(source)
    found = estimates((step for log in logs for step in read(log)), config.estimator)
    dropped, ids = easy(found, config.threshold, config.min_visits), [prompt.id for prompt in prompts]
    none = f"no prompt is left: all {len(ids)} have an estimate above {above}threshold={config.threshold:g}; raise it"
    write_kept(source, prompts, set(ids) - dropped, target, none)
    return results(ids, found, dropped)


def results(ids: Sequence[str], found: dict[str, Estimate], dropped: Collection[str]) -> dict[str, float]:
    """What the filter did with these prompts, in a few numbers."""
    gone = sum(prompt in dropped for prompt in ids)
    return {
        "prompts": float(len(ids)),
        "visited": float(sum(prompt in found for prompt in ids)),
        "dropped": float(gone),
        "kept": float(len(ids) - gone),
    }

"""A run as one page of HTML, to be opened from a file, sent by mail or printed. Nothing is loaded from elsewhere."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from engine.control import trace_page
from tasks import page, run_figures, show, traces, workspace
from tasks.accuracy import Accuracy
from tasks.journal import EvaluationFinished, FileSaved, RunStarted
from tasks.lineage import PATCH
from tasks.outcomes import Outcome
from tasks.record import RunRecord

REPORT = "report.html"
GENERATIONS = 8
"""Pairs of responses that are shown, at most."""
CHARACTERS = 1500
"""Of a prompt or a response, at most."""
QUALITY = "data_quality"


def path(run: str) -> Path:
    """Where the page of the run with id `run` lies."""
    return workspace.run_directory(run) / REPORT


def to_html(outcome: Outcome) -> str:
    """The page, as text."""
    record = outcome.record
    started = next((event for event in outcome.events if isinstance(event, RunStarted) and event.run == record.run), None)
    found = evaluations(outcome)
    return page.render(
        "run.html",
        record=record,
        description=started.description if started else "",
        cards=_cards(record, found),
        average=show.average(record),
        trained=[_row(stage) for stage in show.trained(record)],
        results=[(stage.name, show.results_text(stage.results)) for stage in record.stages if stage.results],
        sections=[section for section in run_figures.sections(outcome, found, started.configuration if started else {}) if section["figures"]],
        dataflow=_dataflow(record),
        generations=list(_generations(outcome)),
        quality=_quality(outcome),
        lineage=list(_lineage(record)),
    )


def evaluations(outcome: Outcome) -> dict[str, Accuracy]:
    """What every evaluation of the run found, by label, in their order."""
    return {event.label: event.accuracy for event in outcome.events if isinstance(event, EvaluationFinished)}


def _cards(record: RunRecord, found: Mapping[str, Accuracy]) -> list[tuple[str, str]]:
    """(number, what it is)."""
    trained = show.trained(record)
    cards = []
    if found:
        first, last = next(iter(found)), list(found)[-1]
        mean = found[last].average.mean
        cards.append((f"{100 * mean:.1f} %", f"avg@{found[last].samples_per_prompt} on {found[last].prompts} test prompts, of {last}"))
        if last != first:
            cards.append((f"{100 * (mean - found[first].average.mean):+.1f}", f"percentage points since {first}"))
    seconds = sum(stage.seconds or 0.0 for stage in record.stages)
    cards += [
        (f"{sum(stage.steps for stage in trained):,}", f"training steps of {len(trained)} stage{'s' if len(trained) != 1 else ''}"),
        (page.seconds(seconds), "in stages, evaluations not counted"),
    ]
    return cards


def _row(stage: Any) -> dict[str, Any]:
    """One stage of the headline table."""
    return {
        "stage": stage,
        "before": show.percent(stage.accuracy_before, stage.interval_before),
        "after": show.percent(stage.accuracy_after, stage.interval),
        "gain": show.gain(stage),
        "better": bool(stage.gain_interval and stage.gain_interval[0] > 0),
        "greedy": f"{show.percent(stage.greedy_before)} → {show.percent(stage.greedy_after)}",
    }


def _dataflow(record: RunRecord) -> dict[str, Any] | None:
    """Of the last recorded step; None where none is."""
    try:
        trace = traces.load(record, None, None)
    except ValueError:
        return None
    return {"stage": trace.stage, "step": trace.step, "svg": Markup(trace_page.graph(trace)), "legend": Markup(trace_page.legend(trace))}


def _generations(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """Recorded samples of the first and of the last evaluation, of the same prompts, spread evenly."""
    found = [event for event in outcome.events if isinstance(event, EvaluationFinished) and event.rows]
    if len(found) < 2:
        return
    first, last = ({row["sample_id"].partition("/")[2]: row for row in event.rows} for event in (found[0], found[-1]))
    both = [name for name in first if name in last]
    for name in (both[number * len(both) // GENERATIONS] for number in range(GENERATIONS)) if len(both) > GENERATIONS else both:
        yield {
            "prompt": _cut(first[name]["prompt"]),
            "ground_truth": first[name]["ground_truth"],
            "difficulty": first[name]["difficulty"],
            "responses": [
                {"label": event.label, "text": _cut(row["response"]), "reward": row["reward"], "tokens": row["response_tokens"]}
                for event, row in ((found[0], first[name]), (found[-1], last[name]))
            ],
        }


def _cut(text: str) -> str:
    return text if len(text) <= CHARACTERS else f"{text[: CHARACTERS - 1]}…"


def _quality(outcome: Outcome) -> dict[str, Any] | None:
    """The verdict on the data, as `tasks.validate` has written it; None where the run had none, or the file is gone."""
    for event in outcome.events:
        if isinstance(event, FileSaved) and event.folder == QUALITY and (file := Path(event.file)).name == "summary.json" and file.is_file():
            return {**json.loads(file.read_text()), "page": str(file.with_name("index.html"))}
    return None


def _lineage(record: RunRecord) -> Iterator[tuple[str, str]]:
    """(what, hash or value), from the code to the base model."""
    lineage = record.lineage
    yield "commit", lineage.commit or "unknown"
    if lineage.patch_digest is not None:
        yield f"not committed: {workspace.run_directory(record.run) / PATCH}", lineage.patch_digest
    for module, digest in lineage.own_modules.items():
        yield f"module {module}", digest
    yield "configuration", lineage.configuration_digest
    yield "package lock file", lineage.lock_digest or "unknown"
    for key, file in lineage.inputs.items():
        yield f"{key} {file.path}", file.sha256
    for split, digest in lineage.dataset_digests.items():
        yield f"split {split}", digest
    yield "base model", lineage.base_model_digest or "unknown"
    yield "seed", str(lineage.seed)
    told = ("platform", "cpu", "cores", "gpus", "device", "dtype")
    yield "machine", ", ".join(str(lineage.hardware[key]) for key in told if lineage.hardware.get(key))
    for unit, run in lineage.parents.items():
        yield f"{unit}, as in", run
    if record.mlflow is not None:
        yield "MLflow run", record.mlflow.run_id
    if record.final_model is not None:
        yield "final model", record.final_model

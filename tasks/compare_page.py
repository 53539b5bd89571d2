"""Several runs side by side as one page of HTML: what came out, the curves over each other, the cost, and what they were made from."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tasks import charts, differences, page, show, workspace
from tasks.charts import Figure, Line, figure
from tasks.curves import StageCurves, curves
from tasks.outcomes import Outcome
from tasks.run_figures import CURVES, Section, bar, cost, smoothed
from tasks.run_report import evaluations

LONGEST_NAME = 200
"""Of a page's file, in characters; file systems take 255 bytes."""


def path(outcomes: Sequence[Outcome]) -> Path:
    """Where the page of these runs goes, where nobody says."""
    runs = [one.record.run for one in outcomes]
    name = "--".join(runs)
    if len(name) > LONGEST_NAME:
        name = f"{runs[0]}--{len(runs) - 1}-others-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return workspace.work_directory() / "compare" / f"{name}.html"


def to_html(outcomes: Sequence[Outcome]) -> str:
    """The page, as text.

    Args:
        outcomes: of two runs or more; all are compared with the first.
    """
    first = outcomes[0].record
    return page.render(
        "compare.html",
        runs=[
            {"record": one.record, "final": show.final(one.record), "seconds": sum(stage.seconds or 0.0 for stage in one.record.stages)}
            for one in outcomes
        ],
        rows=list(_rows(outcomes)),
        sections=[section for section in _sections(outcomes) if section["figures"]],
        differences=[(one.record.run, differences.between(first.lineage, one.record.lineage)) for one in outcomes[1:]],
    )


def _names(outcomes: Sequence[Outcome]) -> list[str]:
    """Of all stages, in order."""
    return list(dict.fromkeys(stage.name for one in outcomes for stage in one.record.stages))


def _rows(outcomes: Sequence[Outcome]) -> Iterator[dict[str, Any]]:
    """Of the headline table: each stage that trains, of each run that has it."""
    for name in _names(outcomes):
        for number, one in enumerate(outcomes):
            for stage in show.trained(one.record):
                if stage.name == name:
                    before, after = show.percent(stage.accuracy_before, stage.interval_before), show.percent(stage.accuracy_after, stage.interval)
                    gain, greedy = show.gain(stage), show.percent(stage.greedy_after)
                    yield {"stage": stage, "css": charts.colour(number), "before": before, "after": after, "gain": gain, "greedy": greedy}


def _sections(outcomes: Sequence[Outcome]) -> Iterator[Section]:
    yield {"title": "Accuracy", "note": "On the test set, with bootstrap intervals over prompts.", "figures": list(_accuracies(outcomes))}
    learnt = [curves(one.events) for one in outcomes]
    for name in _names(outcomes):
        figures = list(_learning([stages.get(name) for stages in learnt]))
        yield {"title": f"Learning: {name}", "note": "Means of the steps around each one, where there are enough of them.", "figures": figures}
    runs = {f"{number}": one.record.stages for number, one in enumerate(outcomes, start=1)}
    yield {"title": "Cost", "note": "Runs by their numbers.", "figures": list(cost(runs))}


def _accuracies(outcomes: Sequence[Outcome]) -> Iterator[Figure]:
    found = [evaluations(one) for one in outcomes]
    labels = list(dict.fromkeys(label for of_run in found for label in of_run))
    if labels:
        for title, greedy in ((show.average(outcomes[0].record), False), ("greedy", True)):
            series = {
                one.record.run: [bar(of_run[label].greedy if greedy else of_run[label].average) if label in of_run else None for label in labels]
                for one, of_run in zip(outcomes, found, strict=True)
            }
            yield figure(title, charts.bars(labels, series, charts.percent, most=1.08))


def _learning(stages: Sequence[StageCurves | None]) -> Iterator[Figure]:
    for title, metrics, form in CURVES:
        there = [metric for metric in metrics if any(stage is not None and metric in stage.metrics for stage in stages)]
        for metric in there:
            drawn: list[Line] = []
            for number, stage in enumerate(stages):
                values = [] if stage is None or metric not in stage.metrics or stage.steps < 2 else stage.metrics[metric].tolist()
                if any(math.isfinite(value) for value in values):
                    drawn += smoothed(values, charts.colour(number), raw=False)
            if drawn:
                yield figure(title if len(there) == 1 else f"{title}: {metric.partition('/')[2].replace('_', ' ')}", charts.lines(drawn, form=form))

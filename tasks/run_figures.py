"""The charts of a run's page, in sections: what was learnt, how long answers were, which prompts were asked, and what it cost."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.control.trace_page import human_bytes
from engine.events import SamplesGenerated
from engine.statistics import Interval
from tasks import charts, drop_easy, page
from tasks.accuracy import Accuracy, difficulty_order
from tasks.charts import Band, Bar, Figure, Form, Line, figure
from tasks.curves import StageCurves, curves
from tasks.journal import EvaluationFinished
from tasks.outcomes import Outcome
from tasks.plots import moving_average
from tasks.record import StageRecord
from tasks.show import PHASE_ORDER, trained

Section = dict[str, Any]
"""`title`, `note`, `figures`."""

CURVES: Sequence[tuple[str, Sequence[str], Form | None]] = (
    ("Reward", ["reward/mean"], None),
    ("SFT loss, nats per token", ["sft/loss", "sft/validation_loss"], None),
    ("Response length, tokens", ["response/tokens_mean", "response/tokens_max"], None),
    ("Entropy, nats per token", ["policy/entropy", "policy/entropy_temperature_1"], None),
    ("Clipped share of tokens", [f"policy/clip_fraction_{kind}" for kind in ("low", "high", "dual", "covariance")], charts.percent),
    ("Truncated responses", ["response/truncated_fraction"], charts.percent),
    ("Groups without signal", ["data/zero_signal_groups"], None),
    ("Gradient norm", ["policy/gradient_norm", "critic/gradient_norm"], None),
    ("Trainer against rollout, nats", ["policy/mean_log_prob_difference", "policy/max_log_prob_difference"], None),
    ("KL from the reference, nats", ["policy/kl_from_reference"], None),
    ("Explained variance of the critic", ["critic/explained_variance"], None),
    ("Learning rate", ["policy/learning_rate", "critic/learning_rate"], None),
    ("Tokens per second", ["throughput/tokens_per_second"], None),
)
MOST_PARTS = 16
"""Of a histogram of outcomes; one has as many as a prompt has samples."""
SMOOTHED = 30
"""Parts of a curve: what is averaged is a thirtieth of it, on either side."""


def sections(outcome: Outcome, found: Mapping[str, Accuracy], configuration: Mapping[str, Any]) -> Iterator[Section]:
    """All sections; some may have no figures.

    Args:
        outcome: the run with its events.
        found: its evaluations.
        configuration: resolved, as JSON values.
    """
    yield {"title": "Accuracy", "note": "On the test set, with bootstrap intervals over prompts.", "figures": list(_accuracies(found))}
    learnt, note = curves(outcome.events), "Thin: each step. Thick: mean of the steps around it."
    for stage in trained(outcome.record):
        yield {"title": f"Learning: {stage.name}", "note": note, "figures": list(_learning(learnt[stage.name])) if stage.name in learnt else []}
    yield {
        "title": "Lengths of responses",
        "note": "Of the samples that were recorded; dashed: their mean.",
        "figures": list(_lengths(outcome)),
    }
    yield {"title": "Prompts and temperature", "note": "", "figures": list(_prompts(outcome, configuration))}
    yield {"title": "Cost", "note": "", "figures": list(cost({outcome.record.run: outcome.record.stages}))}


def _accuracies(found: Mapping[str, Accuracy]) -> Iterator[Figure]:
    if not found:
        return
    name = f"avg@{next(iter(found.values())).samples_per_prompt}"
    series = {name: [bar(one.average) for one in found.values()], "greedy": [bar(one.greedy) for one in found.values()]}
    yield figure("After each stage", charts.bars(list(found), series, charts.percent, most=1.08), list(series))
    difficulties = sorted({level for one in found.values() for level in one.average_by_difficulty}, key=difficulty_order)
    if len(difficulties) > 1:
        by_stage = {label: [bar(one.average_by_difficulty.get(level)) for level in difficulties] for label, one in found.items()}
        yield figure(f"{name} by difficulty", charts.bars(difficulties, by_stage, charts.percent, most=1.08, wide=True), list(found), wide=True)


def bar(interval: Interval | None) -> Bar | None:
    """An accuracy."""
    return None if interval is None else Bar(interval.mean, interval.low, interval.high)


def _learning(stage: StageCurves) -> Iterator[Figure]:
    for title, metrics, form in CURVES:
        there = {metric: stage.metrics[metric].tolist() for metric in metrics if metric in stage.metrics and stage.steps > 1}
        there = {metric: values for metric, values in there.items() if any(math.isfinite(value) for value in values)}
        if not there:
            continue
        drawn = [line for number, values in enumerate(there.values()) for line in smoothed(values, charts.colour(number))]
        yield figure(title, charts.lines(drawn, form=form), [_called(metric) for metric in there] if len(there) > 1 else [])


def smoothed(values: Sequence[float], css: str, *, raw: bool = True) -> list[Line]:
    """A curve [steps] as it is, and over it its moving average where there are enough steps for one."""
    known = [(step, value) for step, value in enumerate(values, start=1) if math.isfinite(value)]
    steps, there = [step for step, _ in known], [value for _, value in known]
    window = 2 * max(2, len(there) // SMOOTHED) + 1
    if len(there) < 3 * window:
        return [Line(css=f"line {css}", xs=steps, ys=there)]
    thin = [Line(css=f"raw {css}", xs=steps, ys=there)] if raw else []
    return [*thin, Line(css=f"line {css}", xs=steps, ys=moving_average(there, window))]


def _called(metric: str) -> str:
    return metric.partition("/")[2].replace("_", " ")


def _lengths(outcome: Outcome) -> Iterator[Figure]:
    training = {
        f"{event.stage} {event.step}": [float(row["response_tokens"]) for row in event.rows]
        for event in outcome.events
        if isinstance(event, SamplesGenerated) and event.rows
    }
    tests = {
        event.label: [float(row["response_tokens"]) for row in event.rows]
        for event in outcome.events
        if isinstance(event, EvaluationFinished) and event.rows
    }
    if training:
        yield figure("In training, by stage and step; tokens", charts.histograms(training), wide=True)
    if tests:
        yield figure("In evaluations; tokens", charts.histograms(tests), wide=True)


def _prompts(outcome: Outcome, configuration: Mapping[str, Any]) -> Iterator[Figure]:
    stages = configuration.get("stages", {})
    for stage in outcome.record.stages:
        directory = Path(stage.output or "")
        with suppress(OSError, ValueError):  # What a stage has left may be gone, or be another version's: the page is then without it.
            if stage.kind == "difficulty" and stage.output:
                counts = json.loads((directory / "histogram.json").read_text())["prompts_by_right_samples"]
                yield _difficulty(stage, counts, stages[stage.name]["keep"])
            elif stage.kind == "drop_easy" and stage.output:
                yield _dropped(stage, {one.name: Path(one.output) for one in outcome.record.stages if one.output}, stages[stage.name])
            elif stage.kind == "temperature_search" and stage.output:
                yield from _temperatures(stage, json.loads((directory / "temperature.json").read_text()))


def _difficulty(stage: StageRecord, counts: Sequence[int], keep: Mapping[str, float]) -> Figure:
    """Prompts by right samples, before and after those outside of the range went."""
    n = len(counts) - 1
    kept = [float(k) if keep["min_rate"] <= right / n <= keep["max_rate"] else 0.0 for right, k in enumerate(counts)]
    series = {"all prompts": [Bar(float(k)) for k in counts], "kept": [Bar(k) for k in kept]}
    title = f"{stage.name}: prompts by right samples of {n}"
    return figure(title, charts.bars([str(k) for k in range(n + 1)], series, lambda value: f"{value:,.0f}"), list(series))


def _dropped(stage: StageRecord, outputs: Mapping[str, Path], settings: Mapping[str, Any]) -> Figure:
    """Prompts that were visited by their estimate, before and after the easy ones went."""
    steps = [step for other in settings["scores_of"] for step in drop_easy.read(outputs[other] / drop_easy.SCORES)]
    found = drop_easy.estimates(steps, settings["estimator"])
    gone = drop_easy.easy(found, settings["threshold"], settings["min_visits"])
    parts = min(MOST_PARTS, max((count for step in steps for count in step.samples), default=1))
    counts = {name: [0.0] * (parts + 1) for name in ("visited prompts", "kept")}
    for prompt, estimate in found.items():
        place = min(parts, max(0, round(parts * estimate.outcome)))
        counts["visited prompts"][place] += 1
        counts["kept"][place] += prompt not in gone
    series = {name: [Bar(value) for value in values] for name, values in counts.items()}
    groups = [f"{number / parts:g}" for number in range(parts + 1)]
    return figure(f"{stage.name}: prompts by outcome", charts.bars(groups, series, lambda value: f"{value:,.0f}"), list(series))


def _temperatures(stage: StageRecord, search: Mapping[str, Any]) -> Iterator[Figure]:
    points, picked = search["points"], search["picked"]["temperature"]
    at = [point["temperature"] for point in points]

    def over(title: str, *names: str, form: Form | None = None, bands: Sequence[Band] = ()) -> Figure:
        drawn = [Line(css=f"line {charts.colour(number)}", xs=at, ys=[point[name] for point in points]) for number, name in enumerate(names)]
        legend = [name.replace("_", " ") for name in names] if len(names) > 1 else []
        return figure(f"{stage.name}: {title}", charts.lines(drawn, bands=bands, marks=[picked], form=form, whole=False), legend)

    interval = Band(css="c0", xs=at, low=[point["accuracy_low"] for point in points], high=[point["accuracy_high"] for point in points])
    yield over(f"accuracy over temperature, picked {picked:g}", "accuracy", form=charts.percent, bands=[interval])
    yield over("diversity over temperature", "diversity")
    yield over("entropy over temperature, nats per token", "entropy", "entropy_temperature_1")


def cost(runs: Mapping[str, Sequence[StageRecord]]) -> Iterator[Figure]:
    """Seconds of each stage by phase, and what synchronisations moved beside the least that would do; of one run or of several."""

    def called(run: str, stage: StageRecord) -> str:
        return stage.name if len(runs) == 1 else f"{run} {stage.name}"

    there = [(called(run, stage), stage) for run, stages in runs.items() for stage in stages]
    phases = [*PHASE_ORDER, *sorted({phase for _, stage in there for phase in stage.seconds_by_phase}.difference(PHASE_ORDER))]
    seconds = {name: stage.seconds_by_phase for name, stage in there if sum(stage.seconds_by_phase.values()) > 0}
    if seconds:
        shown = [phase for phase in phases if any(phase in row for row in seconds.values())]
        yield figure("Seconds by phase", charts.stacked(seconds, shown, page.seconds), [phase.replace("_", " ") for phase in shown], wide=True)
    moved = {name: stage.synchronisations for name, stage in there if stage.synchronisations and stage.synchronisations.ranks}
    if moved:
        most = {name: (max(sync.ranks, key=lambda rank: rank.bytes_received), sync.count) for name, sync in moved.items()}
        series = {
            "received": [Bar(rank.bytes_received / times) for rank, times in most.values()],
            "minimum": [Bar(rank.bytes_minimum / times) for rank, times in most.values()],
        }
        title = "Weights, bytes per synchronisation of the rank that receives most"
        yield figure(title, charts.bars(list(most), series, human_bytes), list(series))

"""Pictures of a run, drawn from its event log: functions from numbers to a Figure, without pyplot and its global state."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from engine.events import SamplesGenerated, StageStarted, StepFinished, WeightsSynchronised
from engine.reshard.ledger import PARTS, Ledger
from engine.statistics import Interval
from tasks.accuracy import Accuracy, difficulty_order
from tasks.journal import EvaluationFinished, LoggedEvent

if TYPE_CHECKING:  # it draws with this module
    from tasks.temperature_search import Point

# Okabe & Ito (2008): told apart with every common colour blindness, and in grey by their order.
BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#56B4E9", "#D55E00"
GREY, INK = "#8C8C8C", "#2B2B2B"
DARK = (BLUE, GREEN)
PHASES = {"generate": BLUE, "reward": GREEN, "log_prob": SKY, "update": ORANGE, "synchronise": PURPLE}
PARTS_OF_SYNCHRONISATION = dict(zip(PARTS, (BLUE, SKY, ORANGE, PURPLE, GREY), strict=True))
EVALUATIONS = (GREY, SKY, BLUE, GREEN, ORANGE, PURPLE, RED)
CLIPPED = ("low", "high", "dual", "covariance")
"""What a loss clips."""
LENGTH_BINS = 16
STEP_BUCKETS = 30
"""Bars of a picture over steps, at most."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over the steps of a stage; both of length [steps]. Values may be NaN, which leaves a gap."""

    steps: Sequence[int]
    values: Sequence[float]

    def finite(self) -> bool:
        """Whether there is anything to draw."""
        return any(math.isfinite(value) for value in self.values)


def curve(events: Iterable[LoggedEvent], stage: str, metric: str) -> Curve:
    """A metric of a stage, at the steps that have it."""
    points = [(e.step, e.metrics[metric]) for e in events if isinstance(e, StepFinished) and e.stage == stage and metric in e.metrics]
    return Curve([step for step, _ in points], [value if math.isfinite(value) else math.nan for _, value in points])


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of the `window` values (an odd number) around each one, of those that exist near the ends.

    It is centred, so that it does not lag behind a falling loss. NaN is left out; NaN where nothing is left.
    """
    means = []
    for index in range(len(values)):
        around = values[max(0, index - window // 2) : index + window // 2 + 1]
        kept = [value for value in around if math.isfinite(value)]
        means.append(sum(kept) / len(kept) if kept else math.nan)
    return means


def stage_figures(events: Sequence[LoggedEvent], stage: str) -> dict[str, Figure]:
    """The pictures of one stage by their file names; those that its metrics allow."""
    lines = {
        "reward": ("Reward", "mean reward of the step's samples", ["reward/mean"], False),
        "response_length": ("Response length", "tokens, mean of the step", ["response/tokens_mean"], False),
        "entropy": ("Entropy of the policy", "nats per token", ["policy/entropy"], False),
        "kl_rollout": ("Trainer against rollout", "log-prob difference", ["policy/kl_rollout", "policy/max_log_prob_difference"], True),
        "clip_fractions": ("Clipped tokens", "share of response tokens", [f"policy/clip_fraction_{k}" for k in CLIPPED], False),
        "synchronisation_bytes": ("Weights moved", "bytes, of the rank with most", ["sync/bytes_received", "sync/bytes_minimum"], False),
        "loss": ("SFT loss", "nats per token", ["sft/loss", "sft/validation_loss"], False),
    }
    figures = {}
    for file, (title, unit, metrics, logarithmic) in lines.items():
        curves = {metric: curve(events, stage, metric) for metric in metrics}
        curves = {metric: found for metric, found in curves.items() if found.finite()}
        if curves:
            figures[file] = line_figure(f"{title} · {stage}", unit, curves, logarithmic=logarithmic)
    lengths = {e.step: [row["response_tokens"] for row in e.rows] for e in events if isinstance(e, SamplesGenerated) and e.stage == stage and e.rows}
    if lengths:
        figures["response_lengths"] = lengths_figure(f"Response lengths · {stage}", lengths)
    phases = {phase: curve(events, stage, f"timing/{phase}_seconds") for phase in PHASES}
    phases = {phase: found for phase, found in phases.items() if found.finite()}
    if len(phases) > 1:
        figures["seconds_by_phase"] = seconds_by_step_figure(f"Seconds by phase · {stage}", phases, PHASES)
    parts = synchronisation_seconds(events, stage)
    if any(len(found.steps) > 1 for found in parts.values()):
        figures["synchronisation"] = seconds_by_step_figure(f"Synchronisation · {stage}", parts, PARTS_OF_SYNCHRONISATION)
    return figures


def run_figures(events: Sequence[LoggedEvent]) -> dict[str, Figure]:
    """The pictures of the whole run by their file names."""
    evaluations = {event.label: event.accuracy for event in events if isinstance(event, EvaluationFinished)}
    figures = {}
    if evaluations:
        figures["accuracy"] = accuracy_figure(evaluations)
        if any(len(accuracy.average_by_difficulty) > 1 for accuracy in evaluations.values()):
            figures["accuracy_by_difficulty"] = difficulty_figure(evaluations)
    seconds = {event.stage: phase_seconds(events, event.stage) for event in events if isinstance(event, StageStarted)}
    seconds = {stage: phases for stage, phases in seconds.items() if phases}
    if seconds:
        figures["seconds_by_phase"] = seconds_by_stage_figure(seconds)
    return figures


def phase_seconds(events: Iterable[LoggedEvent], stage: str) -> dict[str, float]:
    """Seconds that the steps of a stage spent in each phase, and in `other`, which is the rest of the step."""
    totals: dict[str, float] = {}
    for event in events:
        if isinstance(event, StepFinished) and event.stage == stage:
            phases = {phase: event.metrics.get(f"timing/{phase}_seconds", 0.0) for phase in PHASES}
            phases["other"] = max(0.0, event.metrics.get("timing/step_seconds", 0.0) - sum(phases.values()))
            totals = {phase: totals.get(phase, 0.0) + value for phase, value in phases.items()}
    return {phase: value for phase, value in totals.items() if value > 0}


def synchronisation_seconds(events: Iterable[LoggedEvent], stage: str) -> dict[str, Curve]:
    """Seconds of each part of a stage's synchronisations, mean of the ranks: these add up to the whole, the largest over the ranks would not."""
    found = [event for event in events if isinstance(event, WeightsSynchronised) and event.stage == stage and event.ranks]
    means = [{part: s / len(event.ranks) for part, s in sum(event.ranks, Ledger()).by_part().items()} for event in found]
    return {part: Curve([event.step for event in found], [mean[part] for mean in means]) for part in PARTS}


def line_figure(title: str, unit: str, curves: Mapping[str, Curve], *, logarithmic: bool = False) -> Figure:
    """Metrics over steps: each step thin, and a moving average over it where there are enough steps for one.

    `logarithmic` asks for a logarithmic axis; values of 0 or below keep it linear.
    """
    figure, axes = _figure(title, "step", unit)
    for (metric, found), colour in zip(curves.items(), (BLUE, ORANGE, GREEN, PURPLE), strict=False):
        label = metric.replace("/", " ").replace("_", " ")
        window = 2 * max(2, len(found.steps) // 30) + 1
        if len(found.steps) >= 3 * window:
            axes.plot(found.steps, found.values, color=colour, alpha=0.35, linewidth=1.2)
            axes.plot(found.steps, moving_average(found.values, window), color=colour, linewidth=2.6, label=f"{label}, mean of {window} steps")
        else:
            axes.plot(found.steps, found.values, color=colour, linewidth=2.2, marker="o", markersize=4, label=label)
    values = [value for found in curves.values() for value in found.values if math.isfinite(value)]
    if logarithmic and min(values) > 0:
        axes.set_yscale("log")
        axes.minorticks_off()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02, y=0.08)
    _legend(figure, axes)
    return figure


def accuracy_figure(evaluations: Mapping[str, Accuracy]) -> Figure:
    """avg@k and greedy accuracy of each evaluation, in the order of the run, with their bootstrap intervals."""
    figure, axes = _figure("Accuracy on the test set", "", "")
    last = list(evaluations.values())[-1]
    series = {f"avg@{last.samples_per_prompt}": [a.average for a in evaluations.values()], "greedy": [a.greedy for a in evaluations.values()]}
    _grouped_bars(axes, list(evaluations), series, (BLUE, ORANGE), annotate=True)
    axes.set_xlabel(f"evaluations of {last.prompts} prompts")
    _legend(figure, axes)
    return figure


def difficulty_figure(evaluations: Mapping[str, Accuracy]) -> Figure:
    """avg@k by difficulty, one bar for each evaluation, with bootstrap intervals."""
    last = list(evaluations.values())[-1]
    figure, axes = _figure(f"Accuracy by difficulty · avg@{last.samples_per_prompt}", "difficulty", "")
    difficulties = sorted({name for accuracy in evaluations.values() for name in accuracy.average_by_difficulty}, key=difficulty_order)
    series = {label: [accuracy.average_by_difficulty.get(name) for name in difficulties] for label, accuracy in evaluations.items()}
    # The bars' order says which came first; the strongest colours go to the last ones.
    colours = EVALUATIONS[: len(series)] if len(series) != 2 else (GREY, BLUE)
    _grouped_bars(axes, difficulties, series, colours, annotate=False)
    _legend(figure, axes)
    return figure


def lengths_figure(title: str, lengths: Mapping[int, Sequence[float]]) -> Figure:
    """How the lengths of the recorded samples are distributed in each of these steps: one lying histogram a step, all over one axis."""
    figure, axes = _figure(title, "step", "tokens")
    edges = np.linspace(0, max(max(found) for found in lengths.values()) or 1, LENGTH_BINS + 1)
    for place, found in enumerate(lengths.values()):
        counts = np.histogram(found, edges)[0]
        axes.barh((edges[:-1] + edges[1:]) / 2, 0.86 * counts / counts.max(), 0.9 * (edges[1] - edges[0]), left=place, color=BLUE)
        axes.hlines(float(np.mean(found)), place, place + 0.86, colors=ORANGE, linewidth=1.8, label="mean" if place == 0 else "_")
    axes.set_xticks([place + 0.43 for place in range(len(lengths))], [str(step) for step in lengths])
    _legend(figure, axes)
    return figure


def histogram_figure(counts: Sequence[int], kept: Sequence[int]) -> Figure:
    """Prompts by the number of their right samples, 0 to n: all of them, and those that are kept."""
    figure, axes = _figure("Pass rates of the prompts", f"right samples of {len(counts) - 1}", "prompts")
    axes.bar(range(len(counts)), counts, 0.86, color="#C9C9C9", label="all")
    axes.bar(range(len(counts)), kept, 0.86, color=BLUE, label="kept")
    for k, count in enumerate(counts):
        axes.text(k, count, f"{count}", ha="center", va="bottom", fontsize=12, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02, y=0.1)
    _legend(figure, axes)
    return figure


def temperature_figure(points: "Sequence[Point]", picked: float, matched_diversity: float | None) -> Figure:
    """Accuracy with its interval, diversity and entropy over the temperatures of a search; the picked one, and the diversity to match, are marked."""
    figure = Figure(figsize=(8, 8.4), layout=ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.07), facecolor="white")
    FigureCanvasAgg(figure)
    accuracy, diversity, entropy = figure.subplots(3, sharex=True)
    temperatures = [point.temperature for point in points]
    for axes, title, unit, lines in (
        (accuracy, "Accuracy", "", {"accuracy": BLUE}),
        (diversity, "Diversity", "distinct 4-grams over all", {"diversity": GREEN}),
        (entropy, "Entropy", "nats per token", {"entropy": ORANGE, "entropy_temperature_1": PURPLE}),
    ):
        style(axes, title, "", unit)
        for name, colour in lines.items():
            label = {"entropy": "at this temperature", "entropy_temperature_1": "at 1"}.get(name)
            axes.plot(temperatures, [getattr(point, name) for point in points], color=colour, linewidth=2.2, marker="o", markersize=5, label=label)
        axes.axvline(picked, color=RED, linewidth=1.6, linestyle="--")
        axes.margins(x=0.04, y=0.12)
    accuracy.fill_between(temperatures, [point.accuracy_low for point in points], [point.accuracy_high for point in points], color=BLUE, alpha=0.15)
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))
    if matched_diversity is not None:
        diversity.axhline(matched_diversity, color=GREY, linewidth=1.6, linestyle=":", label=f"to match: {matched_diversity:.3g}")
        diversity.legend(fontsize=12, frameon=False, labelcolor=INK)
    entropy.legend(fontsize=12, frameon=False, labelcolor=INK)
    entropy.set_xlabel(f"temperature; picked: {picked:g}", fontsize=13, color=INK)
    return figure


def seconds_by_step_figure(title: str, phases: Mapping[str, Curve], colours: Mapping[str, str]) -> Figure:
    """Seconds of each phase of a step, stacked; steps are joined to at most `STEP_BUCKETS` bars, whose height is their mean."""
    figure, axes = _figure(title, "step", "seconds per step")
    steps = sorted({step for found in phases.values() for step in found.steps})
    buckets = np.array_split(np.asarray(steps), min(STEP_BUCKETS, len(steps)))
    centres = np.asarray([bucket.mean() for bucket in buckets])
    widths = np.asarray([(bucket[-1] - bucket[0] + 1) * 0.86 for bucket in buckets])
    bottom = np.zeros(len(buckets))
    for phase, found in phases.items():
        by_step = dict(zip(found.steps, found.values, strict=True))
        heights = np.asarray([np.mean([np.nan_to_num(by_step.get(int(step), 0.0)) for step in bucket]) for bucket in buckets])
        axes.bar(centres, heights, widths, bottom=bottom, color=colours[phase], label=phase.replace("_", " "))
        bottom += heights
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    _legend(figure, axes)
    return figure


def seconds_by_stage_figure(seconds: Mapping[str, Mapping[str, float]]) -> Figure:
    """Where the time of each stage went: one horizontal bar a stage."""
    figure, axes = _figure("Seconds by phase", "seconds", "")
    stages = list(seconds)
    longest = max(sum(phases.values()) for phases in seconds.values())
    left = np.zeros(len(stages))
    for phase, colour in {**PHASES, "other": "#C9C9C9"}.items():
        widths = np.asarray([seconds[stage].get(phase, 0.0) for stage in stages])
        if not widths.any():
            continue
        axes.barh(stages, widths, 0.62, left=left, color=colour, label=phase.replace("_", " "))
        for row, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width > 0.07 * longest:
                ink = "white" if colour in DARK else INK
                axes.text(start + width / 2, row, f"{width:.0f}", ha="center", va="center", color=ink, fontsize=12, fontweight="bold")
        left += widths
    for row, total in enumerate(left):
        axes.text(total + 0.012 * longest, row, f"{total:.0f} s", va="center", color=INK, fontsize=12)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.13)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color="#E3E3E3")
    _legend(figure, axes)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG of 1200 x 720 pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def style(axes: Axes, title: str, x: str, y: str) -> None:
    """What all pictures have in common."""
    axes.set_title(title, loc="left", fontsize=16, fontweight="bold", color=INK, pad=12)
    axes.set_xlabel(x, fontsize=13, color=INK)
    axes.set_ylabel(y, fontsize=13, color=INK)
    axes.tick_params(labelsize=12, colors=INK, length=0)
    axes.grid(visible=True, axis="y", color="#E3E3E3")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#BBBBBB")


def _grouped_bars(
    axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[Interval | None]], colours: Sequence[str], *, annotate: bool
) -> None:
    width = 0.8 / len(series)
    for position, ((label, intervals), colour) in enumerate(zip(series.items(), _cycled(colours, len(series)), strict=True)):
        for group, interval in enumerate(intervals):
            if interval is None:
                continue
            x = group + (position - (len(series) - 1) / 2) * width
            errors = [[max(0.0, interval.mean - interval.low)], [max(0.0, interval.high - interval.mean)]]
            axes.bar(x, interval.mean, width * 0.92, color=colour, label=label if group == 0 else None)
            axes.errorbar(x, interval.mean, yerr=errors, color=INK, capsize=3, linewidth=1.3)
            if annotate:
                text = f"{100 * interval.mean:.1f}"
                axes.text(x, interval.high + 0.015, text, ha="center", va="bottom", fontsize=12, fontweight="bold", color=INK)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, 1.08 if annotate else 1.03)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _cycled(colours: Sequence[str], count: int) -> list[str]:
    return [colours[index % len(colours)] for index in range(count)]


def _figure(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4.8), layout=ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.07), facecolor="white")
    FigureCanvasAgg(figure)
    axes: Axes = figure.add_subplot()
    style(axes, title, x, y)
    return figure, axes


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    options: dict[str, Any] = {"fontsize": 12, "frameon": False, "labelcolor": INK, "columnspacing": 1.4, "handlelength": 1.4}
    if labels:
        # Below the axes it hides no data.
        figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), **options)

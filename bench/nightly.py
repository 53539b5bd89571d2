"""Does the nightly test keep its promise, and what does it find? Nights are simulated, thousands of them.

    python bench/nightly.py [--reference NAME] [--nights 4000] [--repetitions 200]

Curves are a seed's own shift, which a whole run has, and noise that is correlated along the curve (AR(1) between windows). With --reference,
both come from the reference's own runs; without, half of a curve's variance is the seed's, and neighbouring windows correlate with 0.5.
Writes docs/results/nightly.{json,md,png}; exits with 1 when more false alarms are found than promised.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from report import RESULTS, commit, table, write
from scipy.stats import binomtest

from tasks.comparison import ALPHA, JUDGED, NEWEST_NIGHTS, Night, compare
from tasks.curves import WINDOWS, Series, Summary

NOISE_SPREAD = 0.1
"""Between runs, of the logarithm of a curve's noise: 1 / sqrt(2 x 50) for normal differences of 50 steps."""
EFFECTS = (1.0, 2.0, 3.0, 4.0, 6.0, 9.0, 13.0, 18.0)
"""Regressions, in standard deviations between runs of the mean of the curve."""
DESIGNS = ((5, 0), (5, 30), (8, 0), (8, 30), (20, 0))
"""(seeds of the reference, good nights before)."""
POWER = 0.8
RECIPE = {
    ("sft", "sft/loss"): 1, ("sft", "policy/gradient_norm"): 1, ("sft", "accuracy/average"): 0,
    ("rl", "reward/mean"): 1, ("rl", "policy/entropy"): 1, ("rl", "policy/gradient_norm"): 1, ("rl", "policy/mean_log_prob_difference"): 1,
    ("rl", "response/tokens_mean"): 1, ("rl", "response/truncated_fraction"): 1, ("rl", "data/zero_signal_groups"): 1,
    ("rl", "policy/clip_fraction_low"): 1, ("rl", "policy/clip_fraction_high"): 1, ("rl", "accuracy/average"): 0,
}  # fmt: skip
"""What SFT and GRPO give to judge, without a reference: 1 for a curve, 0 for a single value."""


@dataclass(frozen=True, slots=True)
class Model:
    """How a metric comes out: mean [windows], standard deviation between seeds and within a curve, correlation of neighbouring windows."""

    mean: Sequence[float]
    between: float
    within: float
    correlation: float

    def spread(self) -> float:
        """Standard deviation between runs of the mean over the curve."""
        windows = len(self.mean)
        lags = np.abs(np.subtract.outer(np.arange(windows), np.arange(windows)))
        return math.sqrt(self.between**2 + self.within**2 * float((self.correlation**lags).mean()))


Models = Mapping[tuple[str, str], Model]


def main() -> int:
    """Simulates and writes the results. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", help="whose covariance the simulated curves have")
    parser.add_argument("--nights", type=int, default=4000, help="for each rate of false alarms")
    parser.add_argument("--repetitions", type=int, default=200, help="for each power")
    arguments = parser.parse_args()

    models = of_reference(arguments.reference) if arguments.reference else assumed(0.5, 0.5)
    rates = [false_alarms(name, found, arguments.nights, *design) for name, found, design in null_cases(models)]
    powers = [power(models, effect, arguments.repetitions, *design) for design in DESIGNS for effect in EFFECTS]
    results = {
        "commit": commit(),
        "reference": arguments.reference,
        "metrics": len(models),
        "alpha": ALPHA,
        "false_alarms": rates,
        "power": powers,
        "smallest_found": [smallest(powers, *design) for design in DESIGNS],
    }
    draw(powers)
    write("nightly", results, page(results))
    return 0 if all(rate["p_of_at_most_alpha"] > 1e-3 for rate in rates if rate["normal"]) else 1


def null_cases(models: Models) -> list[tuple[str, Models, tuple[int, int, float]]]:
    """(name, models, (seeds, good nights before, degrees of freedom)). Infinite degrees are the normal distribution, which the test assumes."""
    return [
        ("as assumed, or as the reference", models, (5, 0, math.inf)),
        ("as assumed, or as the reference", models, (5, 8, math.inf)),
        ("as assumed, or as the reference", models, (5, 30, math.inf)),
        ("as assumed, or as the reference", models, (12, 8, math.inf)),
        ("all from the seed", assumed(0.95, 0.5), (5, 8, math.inf)),
        ("hardly any from the seed", assumed(0.05, 0.9), (5, 8, math.inf)),
        ("heavy tails (t with 4 degrees)", models, (5, 0, 4.0)),
        ("heavy tails (t with 4 degrees)", models, (5, 30, 4.0)),
    ]


def assumed(share: float, correlation: float) -> Models:
    """The recipe's metrics, all around 0 with a variance of 1 in each window, of which `share` is the seed's."""
    return {key: Model([0.0] * (WINDOWS if curve else 1), math.sqrt(share), math.sqrt(1 - share), correlation) for key, curve in RECIPE.items()}


def of_reference(name: str) -> Models:
    """Mean, both spreads and the correlation of each judged metric, from the reference's runs (moments)."""
    from tasks import reference

    models = {}
    for stage, metrics in reference.load(name).series().items():
        for metric, runs in metrics.items():
            values = np.asarray([run.windows for run in runs])
            if metric not in JUDGED or not np.isfinite(values).all():
                continue
            mean, windows = values.mean(axis=0), values.shape[1]
            levels = (values - mean).mean(axis=1)
            residuals = values - mean - levels[:, None]
            within = float(residuals.std(ddof=1)) if windows > 1 else 0.0
            neighbours = float((residuals[:, 1:] * residuals[:, :-1]).mean()) if windows > 1 else 0.0
            correlation = min(0.95, max(0.0, neighbours / within**2)) if within > 0 else 0.0
            of_noise = Model(mean.tolist(), 0.0, within, correlation).spread()
            models[stage, metric] = Model(mean.tolist(), math.sqrt(max(0.0, float(levels.var(ddof=1)) - of_noise**2)), within, correlation)
    return models


def runs(models: Models, random: np.random.Generator, count: int, freedom: float = math.inf) -> list[Summary]:
    """So many runs that nothing is wrong with."""
    found: list[Summary] = [{} for _ in range(count)]

    def draw(*shape: int) -> Any:
        return random.normal(size=shape) if math.isinf(freedom) else random.standard_t(freedom, shape) / math.sqrt(freedom / (freedom - 2))

    for (stage, metric), model in models.items():
        shocks = draw(count, len(model.mean))
        noise = np.empty_like(shocks)
        noise[:, 0] = shocks[:, 0]
        for window in range(1, len(model.mean)):
            noise[:, window] = model.correlation * noise[:, window - 1] + math.sqrt(1 - model.correlation**2) * shocks[:, window]
        curves = np.asarray(model.mean) + model.between * draw(count, 1) + model.within * noise
        rough = NOISE_SPREAD * draw(count)
        for number in range(count):
            found[number].setdefault(stage, {})[metric] = Series(windows=curves[number].tolist(), noise=float(rough[number]))
    return found


def stored(models: Models, random: np.random.Generator, seeds: int, freedom: float) -> dict[str, dict[str, list[Series]]]:
    """A reference of so many seeds, as `compare` takes it."""
    drawn = runs(models, random, seeds, freedom)
    return {stage: {metric: [run[stage][metric] for run in drawn] for metric in drawn[0][stage]} for stage in drawn[0]}


def nights(models: Models, random: np.random.Generator, count: int, freedom: float) -> list[Night]:
    """Good nights."""
    return [Night(run, frozenset(models)) for run in runs(models, random, count, freedom)]


def false_alarms(name: str, models: Models, count: int, seeds: int, before: int, freedom: float) -> dict[str, Any]:
    """How many of `count` nights, each with a reference of its own, have a metric that is worse though nothing is."""
    random, alarms = np.random.default_rng([1, seeds, before]), 0
    for _ in range(count):
        verdicts = compare(stored(models, random, seeds, freedom), runs(models, random, 1, freedom)[0], nights(models, random, before, freedom))
        alarms += any(verdict.verdict == "worse" for verdict in verdicts)
    test = binomtest(alarms, count, ALPHA, alternative="greater")
    interval = binomtest(alarms, count).proportion_ci(method="exact")
    print(f"{name}, {seeds} seeds, {before} nights: {alarms} of {count}", flush=True)
    return {
        "case": name,
        "normal": math.isinf(freedom),
        "seeds": seeds,
        "nights_before": before,
        "nights": count,
        "alarms": alarms,
        "rate": alarms / count,
        "interval": [float(interval.low), float(interval.high)],
        "p_of_at_most_alpha": float(test.pvalue),
    }


def power(models: Models, effect: float, count: int, seeds: int, before: int) -> dict[str, Any]:
    """How often a regression of the reward by `effect` standard deviations is found in its first night, and in one of its first seven."""
    random, first, in_seven = np.random.default_rng([2, seeds, before]), 0, 0
    key = next(key for key in models if key[1] == "reward/mean")
    for _ in range(count):
        reference, past = stored(models, random, seeds, math.inf), nights(models, random, before, math.inf)
        for night, run in enumerate(runs(models, random, NEWEST_NIGHTS)):
            series, shift = run[key[0]][key[1]], effect * models[key].spread()
            run[key[0]][key[1]] = Series(windows=[value - shift for value in series.windows], noise=series.noise)
            verdicts = compare(reference, run, past)
            if any((verdict.stage, verdict.metric) == key and verdict.verdict == "worse" for verdict in verdicts):
                first, in_seven = first + (night == 0), in_seven + 1
                break
            past.append(Night(run, frozenset((v.stage, v.metric) for v in verdicts if v.verdict == "within")))
    print(f"{effect:g} deviations, {seeds} seeds, {before} nights: {first / count:.2f}, {in_seven / count:.2f}", flush=True)
    return {"effect": effect, "seeds": seeds, "nights_before": before, "one_night": first / count, "seven_nights": in_seven / count}


def smallest(powers: Sequence[Mapping[str, Any]], seeds: int, before: int) -> dict[str, Any]:
    """The regression that is found with probability `POWER`, between the simulated ones by straight lines; null where none is."""
    found: dict[str, Any] = {"seeds": seeds, "nights_before": before}
    mine = [row for row in powers if (row["seeds"], row["nights_before"]) == (seeds, before)]
    for name in ("one_night", "seven_nights"):
        rates = np.maximum.accumulate([row[name] for row in mine])
        found[name] = float(np.interp(POWER, rates, [row["effect"] for row in mine])) if rates[0] <= POWER <= rates[-1] else None
    return found


def page(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    source = f"the covariance of the reference `{results['reference']}`" if results["reference"] else "half of the variance from the seed, AR(1) 0.5"
    rates = [
        [r["case"], r["seeds"], r["nights_before"], r["nights"], r["alarms"], f"{r['rate']:.2%}", f"{r['interval'][0]:.2%} .. {r['interval'][1]:.2%}"]
        for r in results["false_alarms"]
    ]
    sizes = [
        [
            s["seeds"],
            s["nights_before"],
            *(f"{s[name]:.1f}" if s[name] else f"beyond {EFFECTS[0]:g} .. {EFFECTS[-1]:g}" for name in ("one_night", "seven_nights")),
        ]
        for s in results["smallest_found"]
    ]
    return "\n".join(
        [
            "# The nightly test: false alarms, and what it finds",
            "",
            f"`python bench/nightly.py`, {results['metrics']} metrics, {source}, commit {results['commit']}.",
            f"Promised: at most {ALPHA:.0%} of the nights of a recipe have a false alarm. The interval is the exact binomial one of 95 %.",
            "",
            table(["case", "seeds", "good nights before", "nights", "alarms", "rate", "95 % interval"], rows=rates),
            "",
            f"The smallest lasting regression of the mean reward that is found with a probability of {POWER:.0%}, in standard deviations of the",
            "mean of its curve between runs:",
            "",
            table(["seeds", "good nights before", "in its first night", "within its first seven nights"], rows=sizes, words=0),
            "",
            "![power against the size of the regression](nightly.png)",
            "",
        ]
    )


def draw(powers: Sequence[Mapping[str, Any]]) -> None:
    """Power against the size of the regression: left in the first night, right within seven."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    from tasks.plots import BLUE, GREEN, ORANGE, save, style

    figure = Figure(figsize=(12, 4.8), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    colours = {5: BLUE, 8: ORANGE, 20: GREEN}
    for axes, name, title in zip(
        figure.subplots(1, 2, sharey=True), ("one_night", "seven_nights"), ("first night", "within seven nights"), strict=True
    ):
        style(axes, f"Found in the {title}" if name == "one_night" else f"Found {title}", "regression, standard deviations between runs", "")
        for seeds, before in DESIGNS:
            mine = [row for row in powers if (row["seeds"], row["nights_before"]) == (seeds, before)]
            label, line = f"{seeds} seeds" + (f", {before} nights before" if before else ""), "--" if before else "-"
            axes.plot([row["effect"] for row in mine], [row[name] for row in mine], line, color=colours[seeds], linewidth=2.2, label=label)
        axes.axhline(POWER, color="#8C8C8C", linewidth=1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(frameon=False, fontsize=11, loc="lower right")
    save(figure, RESULTS / "nightly.png")


if __name__ == "__main__":
    sys.exit(main())

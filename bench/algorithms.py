"""Do the shipped algorithms learn? Each trains the same SFT model on the same prompts with the same seeds.

    python bench/algorithms.py [--seeds 0 1] [--algorithms grpo ppo]

Writes docs/results/algorithms.{json,md,png}; exits with 1 when the interval of what one of them gains reaches down to zero. What is measured is kept
under .work/bench by commit, so that an interrupted benchmark goes on where it was.
"""

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from report import ALMANAC, RESULTS, ROOT, newest, once, table, write

from tasks.workspace import run_directory

RECIPE = "grpo_tiny"
BASELINE = "grpo"
ALGORITHMS = [BASELINE, "dr_grpo", "rloo", "ppo", "gspo", "dapo", "cispo", "reinforce_plus_plus"]
WINDOW = 5
"""Steps of the moving average in the picture."""


def main() -> int:
    """Runs all arms and writes the results. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    arguments = parser.parse_args()

    first = arguments.seeds[0]
    model = once("algorithms", f"sft-{first}", lambda: run(["stages.sft.steps=750", "~stages.rl", f"seed={first}"])["final_model"])
    start = ["~stages.sft", "model.architecture=null", f"model.path={model}"]
    arms = []
    for seed in arguments.seeds:
        for algorithm in arguments.algorithms:
            chosen = [f"seed={seed}", f"algorithm@stages.rl.algorithm={algorithm}"]
            arms.append(once("algorithms", f"{algorithm}-{seed}", partial(trained, algorithm, seed, [*start, *chosen])))
    write("algorithms", arms, page(arms))
    draw(arms, RESULTS / "algorithms.png")
    return 0 if all(arm["gain_interval"][0] > 0 for arm in arms) else 1


def trained(algorithm: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """One algorithm, trained and measured."""
    return measured(algorithm, seed, run(overrides))


def run(overrides: list[str]) -> dict[str, Any]:
    """One run of the recipe; what `almanac show` says of it."""
    subprocess.run([ALMANAC, "run", "--fresh", f"recipe={RECIPE}", *overrides], cwd=ROOT, check=True)
    return newest()


def measured(algorithm: str, seed: int, shown: dict[str, Any]) -> dict[str, Any]:
    """What is compared of a run."""
    from engine.events import StepFinished
    from tasks.journal import read_events

    (stage,) = shown["stages"]
    events = read_events(run_directory(shown["run"]) / "events.jsonl")
    steps = [event.metrics for event in events if isinstance(event, StepFinished)]
    return {
        "algorithm": algorithm,
        "seed": seed,
        "commit": shown["lineage"]["commit"],
        "accuracy_before": stage["accuracy_before"],
        "accuracy_after": stage["accuracy_after"],
        "gain": stage["gain"],
        "gain_interval": stage["gain_interval"],
        "steps": stage["steps"],
        "seconds": stage["seconds"],
        "reward": [step["reward/mean"] for step in steps],
        "explained_variance": [step["critic/explained_variance"] for step in steps if "critic/explained_variance" in step],
        "max_log_prob_difference": max(step["policy/max_log_prob_difference"] for step in steps),
    }


def page(arms: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        "# Do the algorithms learn?",
        "",
        f"`python bench/algorithms.py`, the RL stage of `{RECIPE}` from one SFT model, commit {arms[0]['commit']}.",
        "",
        "Accuracy is avg@8 on the held-out test set; the gain's 95 % interval is a bootstrap paired over prompts. *Foreseen* is the mean explained",
        "variance of the critic's values over the last ten steps: 1 where they foresee the returns, 0 where a constant would do as well.",
        "All have the recipe's learning rate, which was chosen with GRPO: this shows that each of them learns, not which is best.",
        "The recipe makes one update a step, in which every ratio is 1: losses that differ in nothing but their clipping give the same numbers.",
        "",
    ]
    header = ["algorithm", "seed", "before", "after", "gain", "95 % interval", "steps", "seconds", "foreseen", "largest log-prob difference"]
    return "\n".join([*lines, table(header, map(row, arms)), "", "![mean reward by step](algorithms.png)", ""])


def row(arm: dict[str, Any]) -> list[str]:
    """One line of the table."""
    low, high = arm["gain_interval"]
    last = arm["explained_variance"][-10:]
    return [
        arm["algorithm"],
        f"{arm['seed']}",
        f"{arm['accuracy_before']:.1%}",
        f"{arm['accuracy_after']:.1%}",
        f"{100 * arm['gain']:+.1f} points",
        f"{100 * low:+.1f} .. {100 * high:+.1f}",
        f"{arm['steps']}",
        f"{arm['seconds']:.0f}",
        f"{sum(last) / len(last):.2f}" if last else "-",
        f"{arm['max_log_prob_difference']:.1e}",
    ]


def draw(arms: list[dict[str, Any]], path: Path) -> None:
    """Mean reward by step: a picture for each algorithm, with the baseline of the same seed behind it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from tasks.plots import BLUE, GREY, moving_average, save, style

    names = list(dict.fromkeys(arm["algorithm"] for arm in arms))
    figure = Figure(figsize=(12, 3 * -(-len(names) // 4)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(-(-len(names) // 4), 4, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    for name, axes in zip(names, grid.flat, strict=False):
        style(axes, name, "", "")
        for shown, colour, width in ((BASELINE, GREY, 1.4), (name, BLUE, 2.4)):
            for arm in (arm for arm in arms if arm["algorithm"] == shown):
                steps = range(1, len(arm["reward"]) + 1)
                axes.plot(steps, arm["reward"], color=colour, alpha=0.3, linewidth=1)
                axes.plot(steps, moving_average(arm["reward"], WINDOW), color=colour, linewidth=width)
    figure.supxlabel("step", fontsize=12)
    figure.supylabel(f"mean reward, average of {WINDOW} steps", fontsize=12)
    figure.suptitle(f"RL stage of {RECIPE} from one SFT model · grey: {BASELINE}", fontsize=14, fontweight="bold")
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())

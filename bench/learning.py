"""Does it learn, and only when it should? Three seeds of the main job, and two control arms that must not learn.

    python bench/learning.py [--seeds 1 2 3]

An arm that was done by this commit with this configuration is not done again (.work/bench/learning). The control arms start from the first seed's
SFT model and run its RL stage with a learning rate of 0 and with shuffled rewards. Writes docs/results/learning.{json,md}; exits with 1 when an arm
did not do what it must.
"""

import argparse
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from report import ALMANAC, ROOT, newest, write

RECIPE = "grpo_tiny"

MINIMUM_GAIN = 0.15
"""Of held-out avg@8 by RL, on every seed."""
MAXIMUM_MINUTES = 15
MAXIMUM_GIGABYTES = 8

CONTROLS = {
    "learning rate 0": "stages.rl.training.optimizer.learning_rate=0.0",
    "shuffled rewards": "stages.rl.reward.shuffle=true",
}


def main() -> int:
    """Runs all arms and writes the results. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    seeds = parser.parse_args().seeds

    arms = [run_arm(f"seed {seed}", [f"seed={seed}"]) for seed in seeds]
    sft_model = arms[0]["sft_model"]
    start = ["model.architecture=null", f"model.path={sft_model}", "~stages.sft", f"seed={seeds[0]}"]
    arms += [run_arm(name, [*start, override]) for name, override in CONTROLS.items()]
    verdicts = {arm["arm"]: verdict(arm) for arm in arms}

    for arm in arms:
        del arm["sft_model"]
    write("learning", arms, page(arms, verdicts))
    return 0 if all(not reasons for reasons in verdicts.values()) else 1


def run_arm(name: str, overrides: list[str]) -> dict[str, Any]:
    """One run of the recipe, cut down to what is compared."""
    print(f"== {name}: {' '.join(overrides)}", flush=True)
    part = part_file([f"recipe={RECIPE}", *overrides])
    if part is not None and part.exists():
        return dict(json.loads(part.read_text()))
    peak = run_measured([str(ALMANAC), "run", "--fresh", f"recipe={RECIPE}", *overrides])
    arm = newest_run(name, overrides, peak)
    if part is not None:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(arm, indent=2))
    return arm


def part_file(overrides: list[str]) -> Path | None:
    """Where an arm's result is kept, by code and resolved configuration; None where the code is no commit's."""
    from tasks.compose import compose
    from tasks.lineage import resolve

    made_of = resolve(compose(overrides))
    if made_of.commit is None or made_of.uncommitted:
        return None
    return ROOT / ".work" / "bench" / "learning" / made_of.commit / f"{made_of.configuration_digest}.json"


def newest_run(name: str, overrides: list[str], peak: float | None) -> dict[str, Any]:
    """What is compared of the newest run; `peak` is the memory of all its processes in GB, None where nobody looked."""
    shown = newest()
    stages = {stage["name"]: stage for stage in shown["stages"]}
    rl = stages["rl"]
    return {
        "arm": name,
        "overrides": [override for override in overrides if not override.startswith("model.path")],
        "sft_avg_at_8": rl["accuracy_before"],
        "rl_avg_at_8": rl["accuracy_after"],
        "gain": rl["gain"],
        "gain_interval": rl["gain_interval"],
        "greedy_before": rl["greedy_before"],
        "greedy_after": rl["greedy_after"],
        "rl_steps": rl["steps"],
        "minutes": minutes_between(shown["started"], shown["finished"]),
        "peak_gigabytes": peak,
        "mean_log_prob_difference": largest_over_steps(shown["run"], "policy/mean_log_prob_difference"),
        "max_log_prob_difference": largest_over_steps(shown["run"], "policy/max_log_prob_difference"),
        "commit": shown["lineage"]["commit"],
        "sft_model": stages["sft"]["model"] if "sft" in stages else None,
    }


def run_measured(command: list[str]) -> float:
    """Runs to the end and returns the peak of the memory that it and all its processes held together, in GB.

    Shared pages are counted once (proportional set size). Raises `CalledProcessError` where the command fails.
    """
    import psutil

    process = subprocess.Popen(command, cwd=ROOT)
    peak = 0.0
    while process.poll() is None:
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            break
        peak = max(peak, sum(map(proportional_set_gigabytes, family)))
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command)
    return peak


def proportional_set_gigabytes(process: Any) -> float:
    """Memory of one process; 0 when it is gone."""
    import psutil

    try:
        return float(process.memory_full_info().pss) / 1e9
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0.0


def minutes_between(started: str, finished: str) -> float:
    """Minutes from one ISO time to another."""
    return (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds() / 60


def largest_over_steps(run: str, metric: str) -> float:
    """Largest value of a metric over all RL steps of a run."""
    from engine.events import StepFinished
    from tasks.journal import read_events
    from tasks.workspace import run_directory

    events = read_events(run_directory(run) / "events.jsonl")
    return max(event.metrics[metric] for event in events if isinstance(event, StepFinished) and metric in event.metrics)


def verdict(arm: dict[str, Any]) -> list[str]:
    """What the arm did wrong; empty when all is as it must be."""
    wrong = []
    if arm["arm"] in CONTROLS:
        if arm["gain_interval"][0] > 0:
            wrong.append("it learnt")
    else:
        if arm["gain"] < MINIMUM_GAIN:
            wrong.append(f"gain below {MINIMUM_GAIN}")
        if arm["gain_interval"][0] <= 0:
            wrong.append("the gain's interval includes 0")
        if not 0.3 <= arm["sft_avg_at_8"] <= 0.7:
            wrong.append("SFT accuracy outside 30-70 %")
        if arm["minutes"] > MAXIMUM_MINUTES:
            wrong.append(f"longer than {MAXIMUM_MINUTES} minutes")
    if arm["peak_gigabytes"] is not None and arm["peak_gigabytes"] > MAXIMUM_GIGABYTES:
        wrong.append(f"more than {MAXIMUM_GIGABYTES} GB")
    if not arm["max_log_prob_difference"] <= 1e-4:
        wrong.append("trainer and rollout disagree")
    return wrong


def page(arms: list[dict[str, Any]], verdicts: dict[str, list[str]]) -> str:
    """The results as Markdown."""
    lines = [
        "# Does it learn, and only when it should?",
        "",
        f"`python bench/learning.py`, recipe `{RECIPE}`, commit {arms[0]['commit']}. Accuracy is avg@8 on the held-out test set; the gain's",
        "95 % interval is a bootstrap paired over prompts. The control arms start from the first seed's SFT model and must not gain.",
        "",
        "| arm | before RL | after RL | gain | 95 % interval | RL steps | minutes | peak GB | log-prob difference, mean | largest | verdict |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for arm in arms:
        low, high = arm["gain_interval"]
        peak = "not measured" if arm["peak_gigabytes"] is None else f"{arm['peak_gigabytes']:.1f}"
        lines.append(
            f"| {arm['arm']} | {arm['sft_avg_at_8']:.1%} | {arm['rl_avg_at_8']:.1%} | {100 * arm['gain']:+.1f} points "
            f"| {100 * low:+.1f} .. {100 * high:+.1f} | {arm['rl_steps']} | {arm['minutes']:.1f} | {peak} "
            f"| {arm['mean_log_prob_difference']:.1e} | {arm['max_log_prob_difference']:.1e} | {'; '.join(verdicts[arm['arm']]) or 'as it must be'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

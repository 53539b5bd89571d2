"""Do the recipes' mechanisms do what they are there for? Each is run beside its control, over seeds; what is exact about them the tests check.

    python bench/mechanisms.py [--seeds 0 1 2] [--only temperature caps]

Every finding is a number that should be above 0, with a 95 % interval over the seeds (Student's t). Whatever comes out is written to
docs/results/mechanisms.{json,md}: a finding against expectation is a result, and no failure. Stages that arms share are run once, and what is
measured is kept under .work/bench by commit, so that an interrupted benchmark goes on.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
from report import ALMANAC, ROOT, commit, newest, once, table, write
from scipy import stats

from engine.events import StepFinished
from tasks import difficulty
from tasks.journal import EvaluationFinished, read_events
from tasks.temperature_search import Search
from tasks.workspace import run_directory

SIZES = [
    "recipe=grpo_tiny",
    "name=mechanisms",
    "data.chain_sum.max_terms=6",
    "data.chain_sum.train_rows=600",
    "data.chain_sum.test_rows=140",
    "evaluation.samples_per_prompt=4",
    # All of them, for the lengths of answers.
    "tracking.samples_per_table=700",
    "stages.sft.steps=400",
    "stages.rl.steps=30",
]
REWARD = "reward: {by_data_source: {chain_sum: exact_match}}"
CAPS = f"max_prompt_tokens: 40, max_response_tokens: 40, {REWARD}"
RATE = f"{{kind: difficulty, {CAPS}, keep: {{max_rate: %s}}}}"
ALL_BOXED = "data.chain_sum.boxed_fraction=1.0"
PROMPTS = 32
"""A step."""
LATE = 10
"""Steps at an RL stage's end that count as late."""


@dataclass
class Ran:
    """One arm, done."""

    summary: Mapping[str, Any]
    """What `almanac show --json` says."""

    def stage(self, name: str) -> Mapping[str, Any]:
        """Its part of the summary."""
        return next(stage for stage in self.summary["stages"] if stage["name"] == name)

    def output(self, name: str) -> Path:
        """Directory of what the stage left."""
        return Path(self.stage(name)["output"])

    def curve(self, metric: str, stage: str = "rl") -> list[float]:
        """A metric of the stage's steps, from the run that made them."""
        events = read_events(run_directory(self.stage(stage)["reused_from"] or self.summary["run"]) / "events.jsonl")
        return [event.metrics[metric] for event in events if isinstance(event, StepFinished) and event.stage == stage and metric in event.metrics]

    def late(self, metric: str, stage: str = "rl") -> float:
        """Its mean at the end."""
        return float(np.mean(self.curve(metric, stage)[-LATE:]))

    def hard_tokens(self) -> float:
        """Mean length of the drawn answers to the questions of 5 and 6 terms in the last evaluation, which has a cap of its own."""
        events = read_events(run_directory(self.summary["run"]) / "events.jsonl")
        rows = [event for event in events if isinstance(event, EvaluationFinished)][-1].rows
        hard = [row for row in rows if row["difficulty"] in ("5", "6") and not row["sample_id"].endswith("/greedy")]
        return float(np.mean([row["response_tokens"] for row in hard]))

    def informative(self, stage: str = "rl") -> list[float]:
        """Share of each step's groups whose samples differ in reward."""
        return [1 - silent / PROMPTS for silent in self.curve("data/zero_signal_groups", stage)]

    def rated(self, name: str) -> dict[str, int]:
        """How many of 8 samples were right, by prompt."""
        rows = parquet.read_table(self.output(name) / difficulty.RATES)
        return dict(zip(rows["prompt"].to_pylist(), rows["right"].to_pylist(), strict=True))


Arms = Callable[..., Ran]
"""Runs overrides, which are put behind `SIZES` and the seed."""


def rl(steps: int, cap: int, learning_rate: float, prompts: str = "null") -> str:
    """An RL stage like the recipe's own, to stand behind other stages."""
    optimizer = f"{{learning_rate: {learning_rate}, warmup_steps: 3, schedule: linear}}"
    sizes = f"steps: {steps}, prompts_per_step: {PROMPTS}, samples_per_prompt: 8, max_prompt_tokens: 40, max_response_tokens: {cap}"
    return f"{{kind: rl, prompts: {prompts}, {sizes}, {REWARD}, training: {{optimizer: {optimizer}}}}}"


def mirror(run: Arms) -> dict[str, float]:
    """1. A strong model finds most prompts easy, a weak one most of them hard: the same prompts, and mirrored histograms."""
    shares = {}
    for name, steps in (("strong", 600), ("weak", 120)):
        rated = run(ALL_BOXED, f"stages.sft.steps={steps}", "~stages.rl", f"stages.rate={RATE % 1.0}").rated("rate")
        right = np.array(list(rated.values()))
        shares[name] = float(np.mean(right == 8) - np.mean(right == 0))
    return {"strong model: share of 8/8 minus share of 0/8": shares["strong"], "weak model: share of 0/8 minus share of 8/8": -shares["weak"]}


def signal(run: Arms) -> dict[str, float]:
    """2. Without the prompts that are answered right 8 times of 8, more groups are informative, and as many more as a second rating foretells."""
    common = [
        ALL_BOXED,
        "stages.sft.steps=600",
        f"stages.rate={RATE % 0.875}",
        f"stages.again={RATE % 1.0}",
        "~stages.rl",
    ]
    found, observed = {}, {}
    for name, prompts in (("filtered", "rate"), ("all", "null")):
        # Frozen, so that what is counted is the pool and not what training makes of it.
        ran = run(*common, f"stages.after={rl(20, 40, 0.0, prompts)}")
        first, second = ran.rated("rate"), ran.rated("again")
        pool = [prompt for prompt, right in first.items() if name == "all" or right < 8]
        foretold = float(np.mean([0 < second[prompt] < 8 for prompt in pool]))
        steps = ran.informative("after")
        observed[name] = float(np.mean(steps))
        error = math.sqrt(foretold * (1 - foretold) / (PROMPTS * len(steps)) + foretold * (1 - foretold) / len(pool))
        found[f"{name}: 2.6 standard errors minus the distance from the share foretold"] = 2.6 * error - abs(observed[name] - foretold)
    return {"informative share: filtered minus all": observed["filtered"] - observed["all"], **found}


def search(run: Arms) -> dict[str, float]:
    """6. Diversity rises with the temperature, accuracy falls in the end, and a policy of less entropy is given a higher temperature."""
    asked = f"{{kind: temperature_search, max_prompts: 100, samples_per_prompt: 8, {CAPS}, grid: {{low: 0.6, high: 1.6, step: 0.1}}, rule: %s}}"
    ran = run(
        "~stages.rl",
        f"stages.before={asked % 'controlled_exploration'}",
        f"stages.train={rl(30, 40, 1e-4)}",
        f"stages.after={asked % 'match_diversity, matches: before'}",
    )
    before, after = Search.read(ran.output("before")), Search.read(ran.output("after"))
    correlation = stats.spearmanr([point.temperature for point in before.points], [point.diversity for point in before.points]).statistic
    accuracies = [point.accuracy for point in before.points]
    return {
        "rank correlation of temperature and diversity, minus 0.9": float(correlation) - 0.9,
        "accuracy: best minus hottest": max(accuracies) - accuracies[-1],
        "entropy at temperature 1: before RL minus after": before.points[4].entropy_temperature_1 - after.points[4].entropy_temperature_1,
        "temperature picked: after RL minus before": after.picked.temperature - before.picked.temperature,
    }


def temperature(run: Arms) -> dict[str, float]:
    """8. RL at a higher temperature keeps entropy and informative groups; the best policy comes of a temperature inside the range."""
    grid = (0.5, 0.7, 1.0, 1.3)
    arms = {value: run(f"stages.rl.sampling.temperature={value}") for value in grid}
    entropy = {value: arm.late("policy/entropy" if value == 1.0 else "policy/entropy_temperature_1") for value, arm in arms.items()}
    share = {value: float(np.mean(arm.informative()[-LATE:])) for value, arm in arms.items()}
    greedy = {value: float(arm.stage("rl")["greedy_after"]) for value, arm in arms.items()}
    return {
        "late entropy at temperature 1: hottest minus coldest": entropy[1.3] - entropy[0.5],
        "late informative share: hottest minus coldest": share[1.3] - share[0.5],
        "greedy accuracy after: best of the inner ones minus best of the ends": max(greedy[0.7], greedy[1.0]) - max(greedy[0.5], greedy[1.3]),
    }


def updates(run: Arms) -> dict[str, float]:
    """10. At the same reward, a policy that was updated eight times a step has lost more entropy than one that was updated once."""
    once, eight = run("stages.rl.sampling.temperature=1.0"), run("stages.rl.updates_per_step=8")

    def smooth(values: Sequence[float]) -> np.ndarray[Any, Any]:
        return np.convolve(values, np.ones(5) / 5, mode="valid")

    curves = [(np.maximum.accumulate(smooth(arm.curve("reward/mean"))), smooth(arm.curve("policy/entropy"))) for arm in (once, eight)]
    low, high = max(curve[0][0] for curve in curves), min(curve[0][-1] for curve in curves)
    levels = np.linspace(low, high, 10)[5:]
    one, many = (float(np.mean(np.interp(levels, rewards, entropies))) for rewards, entropies in curves)
    return {"entropy in the upper half of the rewards that both reach: 1 update minus 8": one - many}


def growth(run: Arms) -> dict[str, float]:
    """12. RL raises the accuracy on the test set; with a learning rate of 0, and with rewards dealt at random, it does not."""
    arms = {
        "as it is": run("stages.rl.sampling.temperature=1.0"),
        "learning rate 0": run("stages.rl.training.optimizer.learning_rate=0.0"),
        "shuffled rewards": run("stages.rl.reward.shuffle=true"),
    }
    gains = {name: float(arm.stage("rl")["gain"]) for name, arm in arms.items()}
    return {
        "gain": gains["as it is"],
        "2 points minus the gain at learning rate 0": 0.02 - gains["learning rate 0"],
        "2 points minus the gain from shuffled rewards": 0.02 - gains["shuffled rewards"],
    }


def caps(run: Arms) -> dict[str, float]:
    """13. When a cap that cuts answers off is raised, fewer are cut off, and answers to hard questions get longer than where it is not."""
    short = "stages.rl.max_response_tokens=13"
    arms = {}
    for name, cap in (("raised", 40), ("kept", 13)):
        arms[name] = run(short, f"stages.second={rl(30, cap, 1e-4)}")
    hard = {name: arm.hard_tokens() for name, arm in arms.items()}
    cut = {name: arm.late("response/truncated_fraction", "second") for name, arm in arms.items()}
    return {
        "share cut off late: cap kept minus raised": cut["kept"] - cut["raised"],
        "tokens of answers to 5 and 6 terms, on the test set: raised minus kept": hard["raised"] - hard["kept"],
    }


MECHANISMS: Mapping[str, Callable[[Arms], dict[str, float]]] = {
    function.__name__: function for function in (mirror, signal, search, temperature, updates, growth, caps)
}


def main() -> int:
    """Runs all arms and writes the findings. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(MECHANISMS), choices=MECHANISMS)
    arguments = parser.parse_args()
    found = {name: [kept(name, seed) for seed in arguments.seeds] for name in arguments.only}
    results = {"commit": commit(), "seeds": arguments.seeds, "sizes": SIZES, "found": found}
    write("mechanisms", results, page(results))
    return 0


def kept(name: str, seed: int) -> dict[str, float]:
    """What a mechanism's arms show with one seed, or showed before with this commit."""
    arms = partial(_arm, seed)
    return dict(once("mechanisms", f"{name}-{seed}", lambda: MECHANISMS[name](arms)))


def _arm(seed: int, *overrides: str) -> Ran:
    return ran([*SIZES, f"seed={seed}", *overrides])


def ran(overrides: Sequence[str]) -> Ran:
    """One run. Stages that lie ready are not run again, so that a second arm with the same settings costs nothing."""
    subprocess.run([ALMANAC, "run", *overrides], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    summary = newest()
    return Ran(summary)


def page(results: Mapping[str, Any]) -> str:
    """The findings as Markdown."""
    lines = [
        "# Do the mechanisms do what they are there for?",
        "",
        f"`python bench/mechanisms.py`, `grpo_tiny` made smaller, seeds {', '.join(map(str, results['seeds']))}, commit {results['commit']}.",
        "Every number should be above 0; intervals are 95 % over the seeds (Student's t). What is exact about the mechanisms is in the tests.",
    ]
    for name, by_seed in results["found"].items():
        rows = [[text, *numbers([found[text] for found in by_seed])] for text in by_seed[0]]
        said = " ".join((MECHANISMS[name].__doc__ or "").split())
        lines += ["", f"## {said}", "", table(["finding", "mean", "interval", "seeds above 0", "so"], rows)]
    return "\n".join(lines) + "\n"


def numbers(values: Sequence[float]) -> list[str]:
    """Mean, interval, how many are above 0, and the verdict."""
    mean, count = float(np.mean(values)), len(values)
    above = sum(value > 0 for value in values)
    if count < 2:
        return [f"{mean:+.3f}", "one seed", f"{above} of 1", "undecided"]
    half = float(stats.t.ppf(0.975, count - 1)) * float(np.std(values, ddof=1)) / math.sqrt(count)
    verdict = "as expected" if mean - half > 0 else "against expectation" if mean + half < 0 else "undecided"
    return [f"{mean:+.3f}", f"{mean - half:+.3f} .. {mean + half:+.3f}", f"{above} of {count}", verdict]


if __name__ == "__main__":
    sys.exit(main())

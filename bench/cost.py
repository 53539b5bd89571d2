"""The models of cost and memory beside measured steps: python bench/cost.py

Runs short versions of grpo_tiny on two cores: as it is, by which the constants of the device `cpu` in tasks/devices.py were chosen, and with other
sizes, which check them. Mean lengths are those that were measured, so that what is compared is the arithmetic alone. Memory is compared by what it
grows by, because a process has a gigabyte of libraries beside. Writes docs/results/cost.{json,md}; a case that is there from the same commit is not
run again.
"""

import json
import statistics
import subprocess
import sys
from typing import Any

from report import ALMANAC, ROOT, commit, newest, table, write

from engine.events import StepFinished
from tasks.compose import compose
from tasks.cost import costs
from tasks.estimate import estimate
from tasks.journal import read_events
from tasks.workspace import run_directory

COMMON = ["recipe=grpo_tiny", "stages.sft.steps=200", "stages.rl.steps=8", "evaluation.max_prompts=8", "evaluation.samples_per_prompt=1"]
CASES = {
    "as it is": [],
    "twice the prompts": ["stages.rl.prompts_per_step=64"],
    "6 layers, hidden 256": ["model.architecture.layers=6", "model.architecture.hidden_size=256", "model.architecture.feed_forward_size=1024"],
    "a critic and a reference": ["algorithm@stages.rl.algorithm=ppo", "stages.rl.algorithm.kl={coefficient: 0.01}"],
}
PHASES = ("generate", "log_prob", "update")
WARM = 3
"""Steps that are left out: the first ones allocate."""


def main() -> int:
    """Runs the cases and writes what they took. Returns the exit code."""
    directory = ROOT / ".work" / "bench" / "cost" / commit()
    found = []
    for name, overrides in CASES.items():
        kept = directory / f"{name.replace(' ', '_')}.json"
        if not kept.exists():
            directory.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(measured(name, [*COMMON, *overrides])))
        found.append(json.loads(kept.read_text()))
    write("cost", found, page(found))
    return 0


def measured(name: str, overrides: list[str]) -> dict[str, Any]:
    """One run: seconds of its RL steps by phase, and its largest memory, beside what the models say."""
    print(f"== {name}", flush=True)
    subprocess.run([ALMANAC, "run", *overrides], check=True, cwd=ROOT)
    shown = newest()
    events = read_events(run_directory(shown["run"]) / "events.jsonl")
    steps = [event.metrics for event in events if isinstance(event, StepFinished) and event.stage == "rl"][WARM:]
    config = compose(overrides)
    (stage,) = config.rl_stages()
    share = statistics.mean(step["response/tokens_mean"] for step in steps) / stage.max_response_tokens
    predicted = estimate(config, "cpu")
    cost = next(cost for cost in costs(config, predicted.architecture, predicted.device, predicted.memory, share) if cost.stage == "rl")
    return {
        "case": name,
        "mean_share": share,
        "predicted_seconds": {phase: cost.seconds[phase] for phase in PHASES},
        "measured_seconds": {phase: statistics.median(step[f"timing/{phase}_seconds"] for step in steps) for phase in PHASES},
        "predicted_gigabytes": predicted.memory.peak / 1e9,
        "measured_gigabytes": max(step["memory/peak_gb"] for step in steps),
    }


def page(found: list[dict[str, Any]]) -> str:
    """The two tables."""
    seconds = []
    for case in found:
        for phase in PHASES:
            predicted, taken = case["predicted_seconds"][phase], case["measured_seconds"][phase]
            seconds.append([case["case"], phase, f"{predicted:.2f}", f"{taken:.2f}", f"{predicted / taken:.2f}"])
    first = found[0]
    grown = [
        [
            case["case"],
            f"{case['measured_gigabytes']:.2f}",
            f"{case['measured_gigabytes'] - first['measured_gigabytes']:+.2f}",
            f"{case['predicted_gigabytes'] - first['predicted_gigabytes']:+.2f}",
        ]
        for case in found
    ]
    return f"""# Cost and memory, predicted and measured

`python bench/cost.py`, two ranks on two cores, commit {commit()}. Seconds are of one step, measured ones the median of {8 - WARM} steps. The
first case is the one by which the constants of the device `cpu` were chosen; the others check them.

{table(["case", "phase", "predicted, s", "measured, s", "ratio"], seconds, words=2)}

Memory of a rank, in GB: the largest that was measured, libraries included, and what it grew by beside the first case.

{table(["case", "measured", "more than the first, measured", "predicted"], grown)}
"""


if __name__ == "__main__":
    sys.exit(main())

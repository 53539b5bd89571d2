"""What the single controller costs: bytes that pass through it, what runs side by side, and the seconds of a step in which no worker works.

    python bench/controller.py

Each arm is the main recipe's RL stage, cut short, as `almanac run` runs it; the numbers come from the traces that every run records. Writes
docs/results/controller.{json,md}; exits with 1 when more than 1 % of a step's bytes pass through the controller.
"""

import statistics
import subprocess
import sys
from typing import Any

from report import ALMANAC, ROOT, newest, table, write

from engine.control.trace import Operation, Trace, covered, from_json

SHORT = ["recipe=grpo_tiny", "stages.sft.steps=150", "stages.rl.steps=12", "evaluation.max_prompts=8"]
KL = "stages.rl.algorithm.kl={coefficient: 0.01}"
ARMS = {
    "GRPO, colocated": ["resources=colocated"],
    "GRPO with KL, split": ["resources=split", KL],
    "PPO with KL, split": ["algorithm@stages.rl.algorithm=ppo", "resources=split", KL],
    "PPO with KL, mixed": ["algorithm@stages.rl.algorithm=ppo", "resources=mixed", KL],
}
INDEPENDENT = [("actor.log_prob", "reference.log_prob"), ("actor.log_prob", "critic.values"), ("actor.generate", "reward.score_ahead")]
MAXIMUM_SHARE = 0.01


def main() -> int:
    """Runs all arms and writes the results. Returns the exit code."""
    arms = [run_arm(name, overrides) for name, overrides in ARMS.items()]
    write("controller", arms, page(arms))
    return 0 if all(arm["largest_share"] <= MAXIMUM_SHARE for arm in arms) else 1


def run_arm(name: str, overrides: list[str]) -> dict[str, Any]:
    """One run, and what its traces say."""
    print(f"== {name}", flush=True)
    subprocess.run([ALMANAC, "run", "--fresh", *SHORT, *overrides], cwd=ROOT, check=True)
    shown = newest()
    files = sorted((ROOT / ".work" / "runs" / shown["run"] / "traces" / "rl").glob("step_??????.json"))
    traces = [from_json(file.read_text()) for file in files]
    return {
        "arm": name,
        "overrides": overrides,
        "commit": shown["lineage"]["commit"],
        "steps": len(traces),
        "controller_bytes": statistics.median(trace.controller_bytes for trace in traces),
        "batch_bytes": statistics.median(trace.batch_bytes for trace in traces),
        "largest_share": max(trace.controller_bytes / trace.batch_bytes for trace in traces),
        "idle_share": statistics.median(idle_share(trace) for trace in traces),
        "operators": statistics.median(len(trace.operations) for trace in traces),
        "side_by_side": {f"{one} and {other}": seconds for one, other in INDEPENDENT if (seconds := together(traces, one, other)) is not None},
    }


def intervals(operations: list[Operation]) -> list[tuple[float, float]]:
    """When any rank of these operators worked."""
    return covered([span for operation in operations for span in operation.spans])


def idle_share(trace: Trace) -> float:
    """Share of a step, from its first call's beginning to its last one's end, in which no worker works at all: dispatch, waiting and rounding."""
    busy = intervals(list(trace.operations))
    return 1 - sum(end - start for start, end in busy) / (busy[-1][1] - busy[0][0])


def together(traces: list[Trace], one: str, other: str) -> float | None:
    """Median share of the shorter operator's seconds in which the other runs too; None where a step lacks one of them."""
    shares = []
    for trace in traces:
        named = [[operation for operation in trace.operations if f"{operation.role}.{operation.operator}" == name] for name in (one, other)]
        if not all(named):
            return None
        first, second = map(intervals, named)
        common = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)
        shares.append(common / min(sum(end - start for start, end in found) for found in (first, second)))
    return statistics.median(shares)


def page(arms: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        "# What the single controller costs",
        "",
        f"`python bench/controller.py`, the RL stage of `grpo_tiny`, commit {arms[0]['commit']};",
        f"medians over {arms[0]['steps']} steps, the largest share over all of them.",
        "",
        "Bytes of the controller are those of every value that it sends to a worker or fetches from one, but not of the reports that say that a",
        "call is done (about 200 bytes a call and rank), nor the texts that are fetched after some steps for people to read",
        "(`samples_table_every_steps`); bytes of the batches are those of every operator's result. *Side by side* is the share of the shorter",
        "operator's seconds in which the other runs too, on two cores that all processes share.",
        "",
    ]
    header = ["arm", "side by side", "operators", "controller", "batches", "largest share", "no worker works"]
    rows = [
        [
            arm["arm"],
            "; ".join(f"{pair} {share:.0%}" for pair, share in arm["side_by_side"].items()),
            f"{arm['operators']:.0f}",
            f"{arm['controller_bytes'] / 1e3:.1f} kB",
            f"{arm['batch_bytes'] / 1e3:.0f} kB",
            f"{arm['largest_share']:.2%}",
            f"{arm['idle_share']:.0%}",
        ]
        for arm in arms
    ]
    return "\n".join([*lines, table(header, rows, words=2), ""])


if __name__ == "__main__":
    sys.exit(main())

"""Are planted regressions found, and in how many nights? The recipe runs with each fault, night after night, until the nightly test says worse.

    python bench/regressions.py [--seeds 8] [--nights 7] [--plants wrong_clip ...] [key=value ...]

The reference is made first, with runs that are there already; nights that are done are not run again (.work/bench/regressions). `nothing` is the
control: no night of it may be worse. Writes docs/results/regressions.{json,md}; exits with 1 when a fault was missed, or the control was not.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import ROOT, commit, table, write

from flows import child_run
from flows.reference import make
from tasks import reference, workspace
from tasks.comparison import Night, compare
from tasks.compose import compose
from tasks.curves import curves, summary
from tasks.journal import read_events
from tasks.reference import Reference

BENCH = Path(__file__).parent
RECIPE = "grpo_tiny"
SMALLER = [
    "name=regressions",
    "stages.sft.steps=300",
    "stages.rl.steps=24",
    # Four updates a step, or no ratio ever leaves 1 and no clip acts; a temperature that is not 1, or nobody would see that it is forgotten.
    "stages.rl.updates_per_step=4",
    "stages.rl.sampling.temperature=1.2",
    "data.chain_sum.max_terms=5",
    "data.chain_sum.test_rows=160",
]
"""About two minutes a run on two cores."""
FIRST_SEED = 1001
"""Of the nights; the reference's are from 1 on."""


@dataclass(frozen=True, slots=True)
class Plant:
    """A fault."""

    how: str
    overrides: tuple[str, ...] = ()
    program: tuple[str, ...] = ("-m", "flows.cli")


PLANTS = {
    "nothing": Plant("the control"),
    "wrong_clip": Plant(
        "the ratio is clipped at 0.02, not 0.2", ("stages.rl.algorithm.loss.clip_low=0.02", "stages.rl.algorithm.loss.clip_high=0.02")
    ),
    "temperature_in_training": Plant("updates at temperature 1, the rollout at 1.2", ("training.backend=planted:ForgetsTemperature",)),
    "stale_tied_head": Plant("the rollout keeps its packed head", ("rollout.backend=planted:StaleHead",)),
    "learning_rate_halved": Plant("5e-5, not 1e-4", ("stages.rl.training.optimizer.learning_rate=5e-5",)),
    "reward_noise": Plant("one score in twenty is turned round", ("stages.rl.reward.by_data_source.chain_sum=planted:noisy",)),
    "duplicated_prompts": Plant("each prompt stands in its step twice", program=(str(BENCH / "planted.py"), "duplicated_prompts")),
}


def main() -> int:
    """Runs everything that is not done, and writes the results. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--nights", type=int, default=7)
    parser.add_argument("--plants", nargs="+", default=list(PLANTS), choices=PLANTS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="on top of this benchmark's own")
    arguments = parser.parse_intermixed_args()
    # For the workers, which look for `planted` there.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(BENCH), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    workspace.quiet_environment()

    overrides = [*SMALLER, *arguments.overrides]
    make(RECIPE, arguments.seeds, overrides)
    known = reference.load(compose([f"recipe={RECIPE}", *overrides]).name)
    found = [measured(known, overrides, name, arguments.nights) for name in arguments.plants]
    results = {"commit": commit(), "seeds": len(known.seeds), "seconds": known.seconds, "overrides": overrides, "plants": found}
    write("regressions", results, page(results))
    return 0 if all((plant["found_in"] is None) == (plant["name"] == "nothing") for plant in found) else 1


def measured(known: Reference, overrides: Sequence[str], name: str, nights: int) -> dict[str, Any]:
    """Nights with a fault until it is found. The control has all its nights."""
    past: list[Night] = []
    for number in range(1, nights + 1):
        one = night(known, overrides, name, number, past)
        print(f"{name}, night {number}: {one['worse'] or one['failure'] or 'nothing is worse'}", flush=True)
        if one["worse"] or one["failure"]:
            return {"name": name, "how": PLANTS[name].how, "nights": number, "found_in": number, "worse": one["worse"], "failure": one["failure"]}
    return {"name": name, "how": PLANTS[name].how, "nights": nights, "found_in": None, "worse": [], "failure": None}


def night(known: Reference, overrides: Sequence[str], name: str, number: int, past: list[Night]) -> dict[str, Any]:
    """One run with the fault, judged beside the reference and the nights before, to which it is added."""
    plant = PLANTS[name]
    kept = workspace.work_directory() / "bench" / "regressions" / reference.digest(known)[:16] / f"{name}_{number}.json"
    if kept.exists():
        outcome = json.loads(kept.read_text())
    else:
        settings = [f"recipe={RECIPE}", *overrides, *plant.overrides, f"seed={FIRST_SEED + number}"]
        ended = child_run.run(settings, kept.with_suffix(".log"), program=plant.program)
        if ended.record is None:
            raise RuntimeError(f"{name}: the run did not even begin: {ended.reason}; its log is {kept.with_suffix('.log')}")
        outcome = {"run": ended.record.run, "failure": ended.reason}
        kept.write_text(json.dumps(outcome))
    measured = summary(curves(read_events(workspace.run_directory(outcome["run"]) / "events.jsonl")))
    verdicts = compare(known.series(), measured, past)
    past.append(Night(measured, frozenset((verdict.stage, verdict.metric) for verdict in verdicts if verdict.verdict == "within")))
    worse = sorted((verdict for verdict in verdicts if verdict.verdict == "worse"), key=lambda verdict: verdict.p)
    return {
        "worse": [
            f"{v.stage} {v.metric} ({v.statistic} {v.statistic_deviation:+.1f} sd, {v.nights} night{'s' if v.nights > 1 else ''})" for v in worse
        ],
        "failure": outcome["failure"],
    }


def page(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    rows = []
    for plant in results["plants"]:
        found = "not found" if plant["found_in"] is None else f"night {plant['found_in']}"
        said = "; ".join(plant["worse"][:3]) or "-"
        rows.append(
            [
                plant["name"],
                plant["how"],
                plant["nights"],
                found,
                f"the run stopped: {plant['failure'].splitlines()[0]}" if plant["failure"] else said,
            ]
        )
    return "\n".join(
        [
            "# Planted regressions",
            "",
            f"`python bench/regressions.py`, `{RECIPE}` made smaller, {results['seeds']} seeds, {results['seconds']:.0f} s a run,",
            f"commit {results['commit']}. Nights follow each other with the fault in all of them, and no good night before.",
            "",
            table(["fault", "planted", "nights run", "found in", "by"], rows, words=5),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

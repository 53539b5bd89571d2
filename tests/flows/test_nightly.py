"""Nights on the real parts: the command, Prefect, and runs in processes of their own. The references are of runs that never ran."""

import json
from pathlib import Path

import psutil
import pytest
from small_recipe import Almanac
from synthetic_runs import store


def verdict(almanac: Almanac) -> dict:
    path = max((almanac.root / ".work" / "nightly").glob("*/verdict.json"))
    assert (path.parent / "report.html").stat().st_size > 10_000
    return json.loads(path.read_text())


@pytest.fixture
def almanac(tmp_path: Path) -> Almanac:
    return Almanac(tmp_path)


def test_a_night_runs_its_recipes_and_judges_them(almanac: Almanac) -> None:
    """Mutation: judge before the run ended, or give the run the reference's seed; or let a recipe that was not started count as worse."""
    store(almanac.root, "small")
    store(almanac.root, "endless", seconds=1e6)
    done = almanac("nightly", "small", "endless", "--budget-seconds", "400", timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    found = verdict(almanac)
    small, endless = found["recipes"]
    assert (small["outcome"], endless["outcome"]) == ("finished", "not started")
    assert "1000000 s" in endless["reason"]
    words = {(one["stage"], one["metric"]): one["verdict"] for one in small["verdicts"]}
    assert set(words.values()) == {"within"}, words
    assert {("sft", "sft/loss"), ("rl", "reward/mean"), ("rl", "accuracy/average"), ("base", "accuracy/average")} <= set(words)
    # Two steps are two windows; nothing of tonight is the reference's.
    assert len(small["summary"]["rl"]["reward/mean"]["windows"]) == 2
    record = json.loads((almanac.root / ".work" / "runs" / small["run"] / "record.json").read_text())
    assert (record["status"], record["seed"]) == ("finished", small["seed"])
    assert "insufficient" in done.stdout
    assert "report: " in done.stdout


def test_nights_run_one_stage_after_the_other(almanac: Almanac) -> None:
    store(almanac.root, "small")
    found = []
    for _ in range(2):
        done = almanac("nightly", "small", "--budget-seconds", "400", "--next-stage", timeout=560)
        assert done.returncode == 0, done.stdout + done.stderr
        found += verdict(almanac)["recipes"]
    first, second = found
    assert [one["part"]["stages"] for one in found] == [["sft"], ["rl"]]
    assert "finished, part 2 of 2 (to rl)" in " ".join(done.stdout.split())
    records = [json.loads((almanac.root / ".work" / "runs" / one["run"] / "record.json").read_text()) for one in found]
    # Mutation: run on to the last stage; or leave out who ends where.
    assert [[stage["name"] for stage in record["stages"]] for record in records] == [["sft"], ["sft", "rl"]]
    # Mutation: another seed, or --fresh: the first stage is then trained again.
    assert first["seed"] == second["seed"] == records[1]["seed"]
    assert records[1]["stages"][0]["reused_from"] == first["run"]
    assert {one["stage"] for one in second["verdicts"]} == {"rl"}


def test_a_run_is_stopped_when_the_budget_is_spent_and_something_worse_is_said(almanac: Almanac) -> None:
    """The loss of the reference's seeds is 1, within a hundredth; what a run has before it learnt anything is 3. Mutation: leave the deadline out."""
    store(almanac.root, "endless", "stages.sft.steps=100000", "stages.rl.steps=2", spread=0.01)
    before = set(psutil.pids())
    done = almanac("nightly", "endless", "--budget-seconds", "100")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    (recipe,) = verdict(almanac)["recipes"]
    assert recipe["outcome"] == "stopped"
    record = json.loads((almanac.root / ".work" / "runs" / recipe["run"] / "record.json").read_text())
    assert record["status"] == "failed"
    assert {one["verdict"] for one in recipe["verdicts"] if one["stage"] == "rl"} == {"insufficient"}
    left = [process for process in psutil.process_iter(["pid", "environ"]) if process.pid not in before]
    assert not [process for process in left if (process.info["environ"] or {}).get("ALMANAC_ROOT") == str(almanac.root) and "ray::" in process.name()]


def test_bad_input_of_any_recipe_is_told_before_anything_starts(almanac: Almanac) -> None:
    """Mutation: check a recipe when its turn comes."""
    store(almanac.root, "small")
    path = almanac.root / "conf" / "reference" / "small.json"
    path.write_text(path.read_text().replace('"stages.sft.steps=100"', '"stages.sft.steps=101"'))
    done = almanac("nightly", "small", "grpo_tiny", "smal", "--budget-seconds", "400")
    assert done.returncode == 2
    for text in (
        "small: the reference of",
        "almanac reference make",
        "grpo_tiny: the recipe has no reference",
        "smal: neither a reference nor a recipe",
    ):
        assert text in done.stderr
    assert not (almanac.root / ".work" / "nightly").exists()

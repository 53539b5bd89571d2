"""From a model or a run to what it was made from, and two runs side by side; stages' outputs are real, their runs never ran."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_runs import synthetic_run

from engine.digest import directory_digest
from tasks import lineage_tree, record
from tasks.compose import compose
from tasks.lineage import resolve
from tasks.outcomes import Outcome, Pair
from tasks.outputs import OUTPUT, Place
from tasks.record import RunRecord

CONFIG = compose(["recipe=grpo_tiny", "name=small", "stages.sft.steps=24", "stages.rl.steps=24"])
FIRST, SECOND = "small-20261130-000001", "small-20261130-000002"


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))


def kept(run: RunRecord, stage: str, weights: str, metrics: Mapping[str, float] | None = None) -> Path:
    """What a stage leaves, with the run's record of it."""
    place, entry = Place("small", stage, {"stage": stage, "weights": weights, "inputs": {"train": "7" * 64}}), run.stage(stage)
    with place.making(keep=False) as directory:
        for name in ("config.json", "sub/weights", "sub.json"):
            (directory / "model" / name).parent.mkdir(exist_ok=True, parents=True)
            (directory / "model" / name).write_text(f"{stage} {name}")
        place.complete(run.run, entry, metrics)
    entry.output, entry.model = str(directory), str(directory / "model")
    record.write(run)
    return directory


def pair() -> tuple[RunRecord, RunRecord]:
    """A run, and one that took over its first stage."""
    first, second = synthetic_run(CONFIG, FIRST), synthetic_run(CONFIG.model_copy(update={"seed": 1}), SECOND, log_of=["rl"])
    sft = kept(first, "sft", "0" * 64, {"sft/loss": 0.25})
    kept(first, "rl", directory_digest(sft / "model"))
    second.stages[0] = first.stage("sft").model_copy(update={"reused_from": FIRST})
    second.lineage.parents = {"sft": FIRST}
    kept(second, "rl", "other")
    return first, second


def shown(what: object) -> str:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_a_models_lineage_leads_from_the_data_to_the_metric() -> None:
    """Mutations: the digest over paths in the output; a manifest by letters, not by directory; the whole chain for the first stage's model."""
    first, _ = pair()
    sft, rl = (Path(stage.output or "") for stage in first.stages)
    run, links = lineage_tree.find(str(rl / "model"))
    assert run.run == FIRST
    assert [(link.stage.name, link.trouble) for link in links] == [("sft", None), ("rl", None)]
    assert [link.model_digest for link in links] == [directory_digest(sft / "model"), directory_digest(rl / "model")]
    # The weights that a stage began with are those that the stage before it has left.
    assert links[1].made is not None
    assert links[1].made.made_from["weights"] == links[0].model_digest
    text = shown(lineage_tree.tree(run, links))
    order = ["code", "base model", "sft sft", "from train", str(sft / "model"), "rl rl", str(rl / "model"), "avg@k"]
    places = [text.index(word) for word in order[:-1]] + [text.rindex(order[-1])]
    assert places == sorted(places)
    assert [link.stage.name for link in lineage_tree.find(str(sft / "model"))[1]] == ["sft"]


def test_a_reused_stage_names_the_run_that_made_it() -> None:
    _, second = pair()
    run, links = lineage_tree.find(second.run)
    assert [(link.stage.name, link.trouble) for link in links] == [("sft", None), ("rl", None)]
    assert f"made by  {FIRST}" in shown(lineage_tree.tree(run, links))
    told = json.loads(json.dumps(lineage_tree.summary(run, links)))
    assert [stage["run"] for stage in told["stages"]] == [FIRST, SECOND]
    assert told["lineage"]["parents"] == {"sft": FIRST}
    assert told["stages"][0]["made_from"]["inputs"] == {"train": "7" * 64}


def test_an_output_that_is_not_the_records_any_more_is_said_to_be() -> None:
    first, _ = pair()
    sft, rl = (Path(stage.output or "") for stage in first.stages)
    (rl / "model" / "config.json").write_text("changed")
    made = json.loads((sft / OUTPUT).read_text())
    (sft / OUTPUT).write_text(json.dumps(made | {"run": "small-20261201-000000"}))
    _, links = lineage_tree.find(FIRST)
    # Mutation: `find` without hashing.
    assert [link.trouble and link.trouble.split(",")[-1].split(":")[0].strip() for link in links] == [
        "by small-20261201-000000",
        f"{rl / 'model' / 'config.json'} is not as it was written",
    ]
    with pytest.raises(ValueError, match=r"cannot be told where it is from: .*config\.json is not as it was written"):
        lineage_tree.find(str(rl / "model"))
    # What an output says that it was made from belongs to its fingerprint.
    (sft / OUTPUT).write_text(json.dumps(made | {"made_from": made["made_from"] | {"weights": "9" * 64}}))
    assert "does not say what the output was made from" in (lineage_tree.find(FIRST)[1][0].trouble or "")


def test_a_directory_that_no_stage_has_left_is_refused(tmp_path: Path) -> None:
    pair()
    with pytest.raises(ValueError, match=r"is no model that a stage has left \(.*output\.json would say which\)"):
        lineage_tree.find(str(tmp_path))
    with pytest.raises(ValueError, match="nearest"):
        lineage_tree.find("small-2026")


def test_two_runs_side_by_side() -> None:
    """Mutation: `then` and `now` the other way round."""
    first, second = pair()
    compared = Pair.of(FIRST, SECOND)
    told = json.loads(json.dumps(compared.summary()))
    assert told["runs"] == [FIRST, SECOND]
    assert {change["what"]: (change["then"], change["now"]) for change in told["differences"]["configuration"]} == {"seed": ("0", "1")}
    assert told["differences"]["packages"] == []
    assert told["stages"]["rl"]["now"]["accuracy_after"] == second.stage("rl").accuracy_after
    last = {(row["stage"], row["metric"]): (row["then"], row["now"]) for row in told["last_metrics"]}
    # The second run took the first stage over, with its curve.
    assert last["sft", "sft/loss"][0] == last["sft", "sft/loss"][1]
    assert last["rl", "reward/mean"][0] != last["rl", "reward/mean"][1]
    text = shown(compared.table())
    for words in ("A  small-20261130-000001", "reward/mean", "Packages  the same", f"{100 * (first.stage('rl').accuracy_after or 0):.1f}"):
        assert words in text
    with pytest.raises(ValueError, match=f"unknown run 'small-20261130-00000'; nearest: {FIRST}|{SECOND}"):
        Pair.of(FIRST, "small-20261130-00000")


def test_a_stage_whose_log_is_gone_has_its_last_metrics_from_its_output(tmp_path: Path) -> None:
    _, second = pair()
    assert Outcome.of(second).last_metrics()["sft"]["sft/loss"] > 0.5
    (tmp_path / ".work" / "runs" / FIRST / "events.jsonl").unlink()
    # Mutation: leave the output out.
    assert Outcome.of(second).last_metrics()["sft"] == {"sft/loss": 0.25}


def test_runs_made_from_the_same_do_not_differ() -> None:
    synthetic_run(CONFIG, FIRST)
    synthetic_run(CONFIG, SECOND)
    told = Pair.of(FIRST, SECOND).summary()
    assert not any(told["differences"].values())
    assert resolve(CONFIG).configuration_digest == CONFIG.digest()

"""What DVC is shown of a run: the same bytes whoever publishes, nothing of another recipe, and no run lost over it."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.statistics import Interval
from engine.trainer.evaluation import Evaluation
from tasks import dvc_graph, publishing, workspace
from tasks.accuracy import Accuracy
from tasks.compose import compose
from tasks.config import RecipeConfig
from tasks.outputs import OUTPUT, DamagedOutputError, Place
from tasks.progress import Notice, Report
from tasks.publishing import Publication, gains, write_steps
from tasks.record import StageRecord
from tasks.validate import Validation

RECORD = StageRecord(name="rl", kind="rl", steps_planned=2, steps=2, status="finished", results={"kept": 3.0})
MADE_FROM = {"stage": "rl"}


@pytest.fixture(scope="module")
def config() -> RecipeConfig:
    return compose(["recipe=grpo_tiny"])


@pytest.fixture
def told() -> list[Report]:
    return []


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have gone into dvc.lock; DVC itself is in tests/flows."""
    calls: list[list[str]] = []
    monkeypatch.setattr(publishing, "Commit", lambda units: calls.append(list(units)))
    return calls


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: RecipeConfig) -> Path:
    """One that DVC is set up in, for the recipe."""
    for name in ("ALMANAC_ROOT", "DVC_STAGE"):
        monkeypatch.delenv(name, raising=False)
    there = workspace.conf_directory()
    monkeypatch.setattr(workspace, "checkout", lambda: tmp_path)
    monkeypatch.setattr("tasks.compose.conf_directory", lambda: there)
    (tmp_path / ".dvc").mkdir()
    dvc_graph.write(config)
    return tmp_path


def made(name: str = "rl", weights: bytes = b"0123") -> Place:
    place = Place("grpo_tiny", name, MADE_FROM | {"weights": weights.hex()})
    with place.making(keep=False) as directory:
        (directory / "model").mkdir()
        (directory / "model" / "weights").write_bytes(weights)
        write_steps(directory / "steps.csv", {1: {"reward/mean": 0.25}, 2: {"reward/mean": 0.5}})
        place.complete("grpo_tiny-1", RECORD, {"reward/mean": 0.5, "timing/step_seconds": 3.0})
    return place


def evaluation(samples: list[list[float]]) -> Evaluation:
    return Evaluation("base", ["a", "b"], ["2", "3"], [0.0, 1.0], samples, [], 9.0, 12)


def summary() -> Accuracy:
    interval = Interval(0.5, 0.25, 0.75)
    by = {"2": interval}
    return Accuracy(samples_per_prompt=2, prompts=2, average=interval, greedy=interval, average_by_difficulty=by, greedy_by_difficulty=by)


def published(checkout: Path, unit: str) -> dict[str, bytes]:
    directory = checkout / "results" / "grpo_tiny" / unit
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_an_output_is_published_as_it_is(checkout: Path, config: RecipeConfig, told: list[Report], committed: list[list[str]]) -> None:
    place, publication = made(), Publication(config, told.append)
    publication.stage("rl", place.directory)
    found = published(checkout, "rl")
    assert {name: content for name, content in found.items() if name != "metrics.json"} == {
        f"output/{path.relative_to(place.directory).as_posix()}": path.read_bytes() for path in place.directory.rglob("*") if path.is_file()
    }
    # Of the machine nothing: a stage that is made again comes out with the same metrics. Mutation: all metrics of the last step.
    assert json.loads(found["metrics.json"]) == {"steps": 2, "reward/mean": 0.5, "kept": 3.0}
    assert found["output/steps.csv"] == b"step,reward/mean\n1,0.25\n2,0.5\n"
    # Weights take their place on the disk once. Mutation: copy.
    weights = checkout / "results/grpo_tiny/rl/output/model/weights"
    assert weights.samefile(place.directory / "model" / "weights")
    publication.close()
    assert (committed, told) == ([["rl"]], [])


def test_publishing_again_touches_nothing_and_another_output_takes_its_place(checkout: Path, config: RecipeConfig, told: list[Report]) -> None:
    place = made()
    Publication(config, told.append).stage("rl", place.directory)
    directory = checkout / "results/grpo_tiny/rl/output"
    before, found = directory.stat().st_ino, published(checkout, "rl")
    Publication(config, told.append).stage("rl", place.directory)
    assert (directory.stat().st_ino, published(checkout, "rl")) == (before, found)
    # Of the same sizes. Mutation: compare sizes only.
    Publication(config, told.append).stage("rl", made(weights=b"9876").directory)
    assert published(checkout, "rl")["output/model/weights"] == b"9876"
    # What was published first is whole still where it was made.
    assert (place.directory / "model" / "weights").read_bytes() == b"0123"


@pytest.mark.parametrize(
    "otherwise",
    [
        lambda checkout: dvc_graph.write(compose(["recipe=grpo_tiny", "stages.rl.steps=3"])),
        lambda checkout: dvc_graph.write(compose(["recipe=smollm2_sums"])),
        lambda checkout: (checkout / "params.yaml").unlink(),
        lambda checkout: (checkout / ".dvc").rmdir(),
    ],
    ids=["another value", "another recipe", "no params.yaml", "no DVC"],
)
def test_a_run_of_something_else_leaves_no_trace(
    otherwise: Callable[[Path], object], checkout: Path, config: RecipeConfig, told: list[Report], committed: list[list[str]]
) -> None:
    # Mutation: compare the recipes' names.
    otherwise(checkout)
    publication = Publication(config, told.append)
    publication.data()
    publication.stage("rl", made().directory)
    publication.close()
    assert (published(checkout, "rl"), committed, told) == ({}, [], [])


def test_a_run_elsewhere_is_not_the_checkouts(
    checkout: Path, config: RecipeConfig, told: list[Report], monkeypatch: pytest.MonkeyPatch, committed: list[list[str]]
) -> None:
    monkeypatch.setenv("ALMANAC_ROOT", str(checkout / "elsewhere"))
    publication = Publication(config, told.append)
    publication.stage("rl", made().directory)
    publication.close()
    assert (published(checkout, "rl"), committed, told) == ({}, [], [])


def test_what_goes_wrong_is_told_and_costs_nothing(checkout: Path, config: RecipeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Report] = []

    def said() -> list[str]:
        found = [event.text for event in told if isinstance(event, Notice)]
        told.clear()
        return found

    # No DVC project at all, though it looks like one. Mutation: let the error through, and every run ends with it.
    with Publication(config, told.append) as publication:
        publication.stage("rl", made().directory)
        publication.close()
        # It is still at work. Mutation: wait in `close`; the run then stands still for seconds.
        assert said() == []
    assert len(lines := said()) == 1
    assert lines[0].startswith("DVC: dvc.lock was not brought up to date; `dvc commit` says:")

    (checkout / "results").rename(checkout / "before")
    (checkout / "results").write_text("")
    publication = Publication(config, told.append)
    publication.stage("rl", made().directory)
    assert len(lines := said()) == 1
    assert str(checkout / "results") in lines[0]
    assert not publication.done("rl")

    (checkout / "dvc.yaml").write_text("stages: {}\n")
    Publication(config, told.append)
    assert said()[0].startswith("DVC: dvc.yaml is not what params.yaml makes it (prepare, validate, evaluate-base, sft,")
    (checkout / "params.yaml").write_text("stages: {}\n")
    Publication(config, told.append)
    assert any("params.yaml" in line for line in said())


def test_under_dvc_a_stage_publishes_itself_alone(
    checkout: Path, config: RecipeConfig, told: list[Report], monkeypatch: pytest.MonkeyPatch, committed: list[list[str]]
) -> None:
    # As DVC names a stage when it is called from a directory below. Mutation: heed it not; `dvc repro` finds its own lock held.
    monkeypatch.setenv("DVC_STAGE", "../dvc.yaml:rl")
    publication = Publication(config, told.append)
    publication.stage("sft", made("sft").directory)
    publication.stage("rl", made().directory)
    publication.close()
    assert published(checkout, "sft") == {}
    assert "output/model/weights" in published(checkout, "rl")
    assert committed == []


def test_what_was_pulled_is_taken_instead_of_made(checkout: Path, config: RecipeConfig, told: list[Report]) -> None:
    place = made()
    Publication(config, told.append).stage("rl", place.directory)
    kept = place.find()
    (checkout / ".work").rename(checkout / "gone")
    publication = Publication(config, told.append)
    # Another fingerprint. Mutation: take whatever is published under the stage's name.
    other = Place("grpo_tiny", "rl", {"stage": "other"})
    publication.lay_out("rl", other)
    assert other.find() is None
    publication.lay_out("rl", place)
    assert place.find() == kept
    # Nothing is published of this one.
    publication.lay_out("sft", Place("grpo_tiny", "sft", {}))
    # Damaged on its way: it is told by whoever takes it.
    (checkout / ".work").rename(checkout / "gone again")
    weights = checkout / "results/grpo_tiny/rl/output/model/weights"
    weights.unlink()
    weights.write_bytes(b"0124")
    publication.lay_out("rl", place)
    with pytest.raises(DamagedOutputError):
        place.find()


def test_the_report_comes_when_all_the_rest_is_there(
    checkout: Path, config: RecipeConfig, told: list[Report], committed: list[list[str]], tmp_path: Path
) -> None:
    def published_all(but: str = "") -> None:
        publication = Publication(config, told.append)
        publication.data()
        for name in ("sft", "rl"):
            publication.stage(name, made(name).directory)
        for label, samples in {"base": [[0.0, 0.0], [0.0, 1.0]], "sft": [[0.0, 1.0], [0.0, 1.0]], "rl": [[1.0, 1.0], [0.0, 1.0]]}.items():
            place = Place("grpo_tiny", "evaluation", {"weights": label})
            with place.making(keep=False) as directory:
                (directory / "evaluation.json").write_text(json.dumps(vars(evaluation(samples))))
                place.complete("grpo_tiny-1")
            publication.evaluation(label, place.directory, summary())
        verdict = tmp_path / "quality"
        verdict.mkdir(exist_ok=True)
        (verdict / "summary.json").write_text("{}")
        if but != "validate":
            publication.validation(Validation(verdict, ["one"], 3, reused=False))
        publication.close()

    published_all(but="validate")
    assert published(checkout, "report") == {}
    assert "report" not in committed[-1]
    published_all()
    assert sorted(committed[-1]) == sorted(dvc_graph.units(config))
    assert told == []
    assert json.loads(published(checkout, "validate")["metrics.json"]) == {"failed": 1}
    assert json.loads(published(checkout, "evaluate-rl")["metrics.json"])["accuracy/avg_at_2"] == 0.5
    found = published(checkout, "report")
    metrics = json.loads(found["metrics.json"])
    # Means over prompts of means over samples: 1/4, 2/4, 3/4.
    assert [(name, line["accuracy"], line.get("gain")) for name, line in metrics.items()] == [
        ("base", 0.25, None),
        ("sft", 0.5, 0.25),
        ("rl", 0.75, 0.25),
    ]
    with pytest.MonkeyPatch.context() as patch:
        # Mutation: draw without `page.drawing`; the run ends with the error. Mutation: count the report as done all the same.
        patch.setattr(publishing.plots, "accuracy_figure", lambda *_: 1 / 0)
        published_all()
        assert [event.text for event in told if isinstance(event, Notice)] == [
            "DVC: the report could not be drawn: ZeroDivisionError: division by zero"
        ]
        assert "report" not in committed[-1]
    published_all()
    # Drawn again, to the last byte: else `dvc status` would never be clean.
    assert published(checkout, "report") == found


def test_gains_are_paired_by_prompt(config: RecipeConfig) -> None:
    before, after = evaluation([[0.0, 1.0], [1.0, 1.0]]), evaluation([[1.0, 1.0], [0.0, 1.0]])
    found = gains({"base": before, "rl": after}, {"base": summary(), "rl": summary()}, config)
    # +1/2 of one prompt and -1/2 of the other: bootstraps draw both, one, or the other twice. Mutation: two separate intervals.
    assert found["rl"] == {"accuracy": 0.5, "greedy": 0.5, "gain": 0.0, "gain_low": -0.5, "gain_high": 0.5}
    assert found["base"] == {"accuracy": 0.5, "greedy": 0.5}


def test_curves_have_a_cell_for_every_step_and_none_of_the_machine(tmp_path: Path) -> None:
    steps = {2: {"sft/loss": math.inf, "timing/step_seconds": 1.0, "memory/peak": 2.0}, 1: {"sft/loss": 0.5, "sft/validation_loss": 0.75}}
    write_steps(tmp_path / OUTPUT, steps)
    assert (tmp_path / OUTPUT).read_text() == "step,sft/loss,sft/validation_loss\n1,0.5,0.75\n2,,\n"

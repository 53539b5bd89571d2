"""`almanac lineage`, `diff`, `report` and `compare`, as a person calls them."""

import json
from pathlib import Path

import pytest
from synthetic_runs import synthetic_run

from flows import cli
from tasks.compose import compose

CONFIG = compose(["recipe=grpo_tiny", "name=small", "stages.sft.steps=6", "stages.rl.steps=6"])
RUNS = ["small-20261130-000001", "small-20261130-000002"]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    for seed, run in enumerate(RUNS):
        synthetic_run(CONFIG.model_copy(update={"seed": seed}), run)
    return tmp_path


def test_json_is_for_programs_and_the_newest_run_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lineage", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["lineage"]["seed"]) == (RUNS[1], 1)
    assert cli.main(["diff", *RUNS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == RUNS


def test_people_are_told_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lineage", RUNS[0]]) == 0
    assert cli.main(["diff", *RUNS]) == 0
    told = capsys.readouterr().out
    for words in (RUNS[0], "base model", "Accuracy on the test set", "seed"):
        assert words in told


@pytest.mark.parametrize("verb", [["lineage"], ["diff", RUNS[0]], ["report"], ["compare", RUNS[0]]])
def test_an_unknown_run_names_the_nearest(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    # Mutation: a traceback, or exit code 0.
    assert cli.main([*verb, "small-20261130-00000"]) == 2
    said = capsys.readouterr().err
    assert "unknown run 'small-20261130-00000'; nearest: small-20261130-00000" in said


def test_pages_are_written_where_it_says(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", RUNS[0]]) == 0
    assert cli.main(["compare", *RUNS]) == 0
    assert cli.main(["compare", *RUNS, "--output", str(root / "new" / "page.html")]) == 0
    pages = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert pages[0] == root / ".work" / "runs" / RUNS[0] / "report.html"
    assert pages[2] == root / "new" / "page.html"
    assert all(run in pages[1].read_text() for run in RUNS)
    assert RUNS[0] in pages[0].read_text()


def test_a_run_is_not_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", RUNS[0], RUNS[0]]) == 2
    assert "alone cannot be compared; name another run beside it" in capsys.readouterr().err

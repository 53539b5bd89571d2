"""What Prefect's pages are given."""

import logging
from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import PrefectHTTPStatusError
from synthetic_runs import synthetic_run

from engine.events import EvaluationProgressed, StageFinished, StageStarted, StepFinished
from flows import artifacts
from tasks import nights, reference
from tasks.compose import compose
from tasks.record import Lineage, RunRecord, StageRecord


def record(**stage: Any) -> RunRecord:
    return RunRecord(
        run="grpo_tiny-20261130-000000",
        recipe="grpo_tiny",
        seed=0,
        stages=[StageRecord(**({"name": "rl", "kind": "rl", "steps_planned": 45} | stage))],
        lineage=Lineage(configuration_digest="0", seed=0),
    )


def row(**stage: Any) -> dict[str, Any]:
    found = record(**stage)
    return artifacts.stage_row(found, found.stage("rl"))


def test_a_stage_that_trains_is_a_row_with_its_accuracies() -> None:
    """Mutation: before and after exchanged; fractions in the place of %."""
    found = row(
        steps=45,
        accuracy_before=0.25,
        interval_before=(0.2, 0.3),
        accuracy_after=0.5,
        interval=(0.45, 0.55),
        gain=0.25,
        gain_interval=(0.2, 0.3),
        seconds=61.26,
        output="/there",
    )
    assert found == {
        "stage": "rl",
        "kind": "rl",
        "run": "grpo_tiny-20261130-000000",
        "steps": "45 of 45",
        "accuracy before": "25.0 [20.0, 30.0]",
        "accuracy after": "50.0 [45.0, 55.0]",
        "gain": "+25.0 [+20.0, +30.0]",
        "seconds": 61.3,
        "made by": "grpo_tiny-20261130-000000",
        "output": "/there",
    }


def test_a_stage_that_lay_ready_names_who_made_it_and_one_that_asks_what_it_found() -> None:
    found = row(kind="difficulty", steps_planned=None, results={"kept": 80.0}, reused_from="another")
    assert (found["made by"], found["kept"]) == ("another", 80.0)
    assert not {"steps", "gain", "seconds"} & set(found)


def test_keys_are_what_prefect_takes() -> None:
    """Mutation: leave underscores; Prefect refuses the artifact."""
    assert artifacts.key("grpo_tiny", "rl") == "grpo-tiny-rl"
    assert artifacts.key("progress", "evaluate Base") == "progress-evaluate-base"


def test_a_night_is_a_line_for_each_recipe_and_names_what_is_worse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: list all metrics, or leave out the statistic."""
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    settings = ["recipe=grpo_tiny", "name=small", "stages.sft.steps=24", "stages.rl.steps=24"]
    config = compose(settings)
    seeded = [config.model_copy(update={"seed": seed}) for seed in range(1, 10)]
    known = reference.build(config, "grpo_tiny", settings[1:], [synthetic_run(one, f"small-20261129-0000{one.seed:02}") for one in seeded[:8]])
    run = synthetic_run(seeded[8], "small-20261130-000009", shift={"reward/mean": -0.6})
    judged = nights.judged("20261201-020000", known, seeded[8], "finished", run, None, 590.0)
    late = nights.not_started(known, config, "a run takes | 600 s")
    text = artifacts.night_markdown(nights.record("20261201-020000", 3600.0, [judged, late]), "/there/report.html")
    lines = text.splitlines()
    assert lines[0] == "# Night 20261201-020000: something is worse"
    (small, not_started) = [line for line in lines if line.startswith("| small")]
    assert small.startswith("| small | worse | finished | rl reward/mean (")
    assert "sft/loss" not in small
    assert not_started == "| small | insufficient | not started | a run takes \\| 600 s |"
    assert lines[-1].endswith("`/there/report.html`")


def test_progress_is_drawn_now_and_then_and_its_end_always() -> None:
    """Mutation: draw every step; forget the end; or draw stages that were over in a moment."""
    told: list[Any] = []
    drawn: list[tuple[str, float]] = []
    now = [0.0]
    progress = artifacts.Progress(told.append, lambda phase, percent: drawn.append((phase, percent)), lambda: now[0])
    progress(StageStarted(stage="sft", kind="sft", steps=100))
    for step in range(1, 101):
        now[0] += 1.0
        progress(StepFinished(stage="sft", step=step, metrics={}))
    progress(StageFinished(stage="sft", steps=100, seconds=100.0))
    # One every fifteen seconds, and the end.
    assert [phase for phase, _ in drawn] == ["sft"] * len(drawn)
    assert [percent for _, percent in drawn][:3] == [15.0, 30.0, 45.0]
    assert drawn[-1] == ("sft", 100.0)
    assert len(drawn) <= 9
    assert len(told) == 102
    before = len(drawn)
    progress(EvaluationProgressed(label="sft", done=30, total=30))
    assert len(drawn) == before


def test_what_prefect_does_not_take_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Mutation: let it through; a run of days would end for a picture of it."""
    import httpx

    request = httpx.Request("POST", "http://there/artifacts")
    refused = PrefectHTTPStatusError("422 of /artifacts", request=request, response=httpx.Response(422, request=request))
    with caplog.at_level(logging.WARNING, "flows.artifacts"), artifacts.best_effort():
        raise refused
    assert "422 of /artifacts" in caplog.text
    with pytest.raises(ValueError, match="ours"), artifacts.best_effort():
        raise ValueError("ours")

"""A recipe that searches its temperature, converges, and then collapses: the tasks on the real engine and MLflow, without Prefect."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import ray
from mlflow import MlflowClient
from small_recipe import SMALL

from engine.events import StepFinished
from engine.trainer.ends import CollapseError
from tasks import record, stages, workspace
from tasks.compose import compose
from tasks.context import open_run
from tasks.progress import BASE, Notice, Report
from tasks.record import RunRecord
from tasks.stage_config import kind_of
from tasks.temperature_search import Search

CAPS = "max_prompt_tokens: 40, max_response_tokens: 16"
REWARD = "reward: {by_data_source: {chain_sum: exact_match}}"
RL = f"kind: rl, prompts_per_step: 4, samples_per_prompt: 4, {CAPS}, {REWARD}, training: {{optimizer: {{learning_rate: 1e-4}}}}"
NOTHING_GROWS = "{window_steps: 20, min_steps: 20, max_reward_growth: 100.0, max_length_growth: 100.0}"
SETTINGS = [
    *(setting for setting in SMALL if not setting.startswith(("resources=", "stages.rl."))),
    "~stages.rl",
    "resources=one_cpu",
    "stages.sft.steps=40",
    f"stages.search={{kind: temperature_search, grid: {{low: 0.5, high: 1.5, step: 0.5}}, samples_per_prompt: 4, max_prompts: 8, {CAPS}, {REWARD}}}",
    f"stages.first={{{RL}, steps: 30, temperature_from: search, ends: {{convergence: {NOTHING_GROWS}}}}}",
    f"stages.last={{{RL}, steps: 30, ends: {{collapse: {{patience_steps: 2, max_truncated_share: 0.0, max_duplicate_share: 0.0}}}}}}",
]
RUN = "grpo_tiny-20260101-000001"


@dataclass
class Ran:
    error: CollapseError
    told: list[Report] = field(default_factory=list)

    @property
    def record(self) -> RunRecord:
        return record.load(RUN)


def run(told: list[Report]) -> None:
    """The recipe, as the flow calls its parts."""
    config = compose(SETTINGS)
    with open_run(config, RUN, told.append) as context:
        stages.create_model(context)
        stages.prepare_data(context)
        stages.evaluate(context, BASE)
        for stage, settings in config.stages.items():
            stages.run_stage(context, stage)
            if kind_of(settings).trains:
                stages.evaluate(context, stage)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ALMANAC_ROOT", str(tmp_path_factory.mktemp("root")))
        for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
            patched.delenv(name, raising=False)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
        told: list[Report] = []
        with pytest.raises(CollapseError) as raised:
            run(told)
        yield Ran(raised.value, told)
        ray.shutdown()


def steps(ran: Ran, stage: str) -> list[StepFinished]:
    return [event for event in ran.told if isinstance(event, StepFinished) and event.stage == stage]


def test_a_stage_samples_at_the_temperature_that_was_picked(ran: Ran) -> None:
    search, first = ran.record.stage("search"), ran.record.stage("first")
    found = Search.read(Path(search.output or ""))
    assert [point.temperature for point in found.points] == [0.5, 1.0, 1.5]
    # Hotter policies are more diverse, whatever they answer.
    assert [point.entropy for point in found.points] == sorted(point.entropy for point in found.points)
    assert found.points[1].entropy == pytest.approx(found.points[1].entropy_temperature_1, abs=1e-4)
    assert search.results["temperature"] == found.picked.temperature
    assert first.temperature == found.picked.temperature
    # Of a stage that samples at 1 there is one entropy. Mutation: the picked temperature does not reach the workers.
    told = all("policy/entropy_temperature_1" in step.metrics for step in steps(ran, "first"))
    assert told == (found.picked.temperature != 1.0)
    assert any(isinstance(event, Notice) and "which search has picked" in event.text for event in ran.told)


def test_a_stage_that_converged_has_fewer_steps_than_were_planned(ran: Ran) -> None:
    first = ran.record.stage("first")
    assert (first.status, first.steps, first.steps_planned, first.ended_by) == ("finished", 20, 30, "convergence")
    assert len(steps(ran, "first")) == 20
    assert (workspace.run_directory(RUN) / "traces" / "first" / "step_000020.html").is_file()


def test_a_collapse_ends_the_run_with_a_verdict_and_leaves_the_weights(ran: Ran) -> None:
    last = ran.record.stage("last")
    assert (ran.record.status, last.status, last.ended_by) == ("failed", "failed", "collapse")
    assert last.steps == len(steps(ran, "last")) < 30
    assert ran.record.error == str(ran.error) == last.ended_because
    assert f"stage last has collapsed, and was stopped after step {last.steps} of 30" in str(ran.error)
    assert last.model == str(workspace.run_directory(RUN) / "collapsed" / "last" / "model")
    assert (Path(last.model) / "model.safetensors").is_file()
    # Mutation: the collapsed weights become the run's final model.
    assert ran.record.final_model == ran.record.stage("first").model
    assert last.output is None


def test_mlflow_shows_how_each_stage_ended(ran: Ran) -> None:
    reference = ran.record.mlflow
    assert reference is not None
    client = MlflowClient(reference.tracking_uri)
    parent = client.get_run(reference.run_id)
    assert (parent.info.status, parent.data.tags["almanac.error"]) == ("FAILED", str(ran.error))
    children = client.search_runs([reference.experiment_id], f"tags.`mlflow.parentRunId` = '{reference.run_id}'")
    found = {child.info.run_name: child for child in children}
    assert (found["last"].info.status, found["last"].data.tags["almanac.error"]) == ("FAILED", str(ran.error))
    assert (found["first"].info.status, found["first"].data.tags["almanac.ended_by"]) == ("FINISHED", "convergence")
    assert len(client.get_metric_history(found["search"].info.run_id, "search/diversity")) == 3
    assert [file.path for file in client.list_artifacts(found["search"].info.run_id, "results")] == ["results/temperature.json"]
    assert "plots/temperature.png" in [file.path for file in client.list_artifacts(found["search"].info.run_id, "plots")]

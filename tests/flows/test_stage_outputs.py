"""A recipe with every kind of stage, broken off twice and gone on with, then once without a break: the tasks on the real engine, without Prefect."""

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import ray
import torch
from small_recipe import SMALL
from transformers import AutoModelForCausalLM

from engine.digest import directory_digest
from engine.events import StepFinished
from engine.trainer.replay import kept_operations, step_directory
from tasks import journal, record, stages, workspace
from tasks.compose import compose
from tasks.context import open_run
from tasks.drop_easy import read
from tasks.progress import BASE, START_ENGINE, Notice, PhaseFinished, PhaseStarted, Report
from tasks.record import RunRecord
from tasks.stage_config import kind_of

CAPS = "max_prompt_tokens: 40, max_response_tokens: 16"
REWARD = "reward: {by_data_source: {chain_sum: exact_match}}"
RATE = f"stages.rate={{kind: difficulty, samples_per_prompt: 4, {CAPS}, {REWARD}, prompts_per_batch: 12, keep: {{max_rate: 1.0}}}}"
SETTINGS = [
    *(setting for setting in SMALL if not setting.startswith("resources=")),
    "resources=one_cpu",
    "data.chain_sum.train_rows=30",
    RATE,
    "stages.second={kind: rl, prompts: rate, steps: 3, prompts_per_step: 4, samples_per_prompt: 4, keep_calls_every_steps: 1, "
    f"{CAPS}, {REWARD}, training: {{optimizer: {{learning_rate: 1e-3}}}}}}",
    "stages.easy={kind: drop_easy, scores_of: [rl, second], prompts: rate, threshold: 0.6}",
]


@pytest.fixture(scope="module", autouse=True)
def _root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ALMANAC_ROOT", str(tmp_path_factory.mktemp("root")))
        for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
            patched.delenv(name, raising=False)
        # The runs share a cluster, and each starts workers of its own on it.
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
        yield
        ray.shutdown()


class Killed(BaseException):
    """Stands for whatever ends a process."""


@dataclass
class Ran:
    """A run that has ended, one way or another."""

    run: str
    told: list[Report] = field(default_factory=list)

    @property
    def record(self) -> RunRecord:
        return record.load(self.run)

    @property
    def engines(self) -> int:
        """How often the engine was started."""
        return sum(event == PhaseStarted(phase=START_ENGINE) for event in self.told)

    def steps(self, stage: str) -> list[StepFinished]:
        return [event for event in self.told if isinstance(event, StepFinished) and event.stage == stage]

    def reused(self) -> list[str]:
        return [stage.name for stage in self.record.stages if stage.reused_from is not None]

    def output(self, stage: str) -> Path:
        return Path(self.record.stage(stage).output or "")

    def hashes(self, stage: str) -> dict[str, Any]:
        """Of the files that hold numbers, as they were when the run had ended."""
        files = json.loads((self.output(stage) / "output.json").read_text())["files"]
        return {name: entry["sha256"] for name, entry in files.items() if not name.endswith(".png")}


def run(name: str, *overrides: str, kill: Callable[[Report], bool] = lambda event: False, fresh: bool = False) -> Ran:
    """The recipe, as the flow calls its parts."""
    config, ran = compose([*SETTINGS, *overrides]), Ran(f"grpo_tiny-{name}")

    def listen(event: Report) -> None:
        ran.told.append(event)
        if kill(event):
            raise Killed

    def body() -> None:
        with open_run(config, ran.run, listen, fresh=fresh) as context:
            stages.create_model(context)
            stages.prepare_data(context)
            stages.evaluate(context, BASE)
            for stage, settings in config.stages.items():
                stages.run_stage(context, stage)
                if kind_of(settings).trains:
                    stages.evaluate(context, stage)

    try:
        body()
    except Killed:
        assert ran.record.status == "failed"
    else:
        assert ran.record.status == "finished"
    return ran


def at(stage: str, step: int) -> Callable[[Report], bool]:
    """When the engine says that this step is done."""
    return lambda event: isinstance(event, StepFinished) and (event.stage, event.step) == (stage, step)


@dataclass
class Runs:
    """In this order, all under one root."""

    rating: Ran
    """Broken off in the stage `rate`, after its second batch of three."""
    training: Ran
    """Goes on, and is broken off in `second`, after its first step."""
    ended: Ran
    again: Ran
    """The same once more."""
    hashes: dict[str, dict[str, Any]]
    """Of the outputs, by stage, before the next run made them anew."""
    whole: Ran
    """Fresh, and never broken off."""


@pytest.fixture(scope="module")
def runs(_root: None) -> Runs:
    first = [run("20260101-000001", kill=at("rate", 2)), run("20260101-000002", kill=at("second", 1))]
    ended, again = run("20260101-000003"), run("20260101-000004")
    hashes = {stage.name: ended.hashes(stage.name) for stage in ended.record.stages}
    return Runs(*first, ended, again, hashes, run("20260101-000005", fresh=True))


def test_a_run_goes_on_with_the_stage_that_another_was_broken_off_in(runs: Runs) -> None:
    # Mutation: output.json written first; `rate` would be taken half-made.
    assert runs.rating.reused() == []
    assert [len(runs.rating.steps(stage)) for stage in ("sft", "rl", "rate", "second")] == [100, 2, 2, 0]
    assert runs.training.reused() == ["sft", "rl"]
    assert [event.step for event in runs.training.steps("rate")] == [3]
    assert runs.ended.reused() == ["sft", "rl", "rate"]
    assert [event.step for event in runs.ended.steps("second")] == [1, 2, 3]
    assert {stage.reused_from for stage in runs.ended.record.stages} == {runs.rating.run, runs.training.run, None}


def test_a_run_that_was_broken_off_makes_what_another_would_have_made(runs: Runs) -> None:
    # To the last bit, though one engine held all stages here, and there each run began with weights from the disk. Mutations: an engine that goes on
    # with weights other than those exported; a score log that is not begun anew; seeds by batch.
    assert runs.whole.engines == 1
    for stage in ("sft", "rl", "rate", "second", "easy"):
        assert runs.whole.hashes(stage) == runs.hashes[stage], stage

    def metrics(ran: Ran) -> list[dict[str, float]]:
        kept = ("reward/", "policy/", "response/", "data/")
        return [{name: value for name, value in event.metrics.items() if name.startswith(kept)} for event in ran.steps("second")]

    assert metrics(runs.whole) == metrics(runs.ended)
    for stage in ("sft", "rl", "second"):
        ours, theirs = runs.whole.record.stage(stage), runs.ended.record.stage(stage)
        assert (ours.accuracy_before, ours.accuracy_after) == (theirs.accuracy_before, theirs.accuracy_after)
        assert ours.gain_interval == theirs.gain_interval


def test_what_lies_ready_is_not_made_again_and_its_numbers_are_kept(runs: Runs) -> None:
    assert runs.again.engines == 0
    assert runs.again.reused() == ["sft", "rl", "rate", "second", "easy"]
    # Mutation: leave the parents out of `stages._kept`.
    parents = runs.again.record.lineage.parents
    assert {name: run for name, run in parents.items() if not name.startswith("evaluate-")} == {
        stage.name: stage.reused_from for stage in runs.again.record.stages
    }
    assert {name for name in parents if name.startswith("evaluate-")} == {"evaluate-base", "evaluate-sft", "evaluate-rl", "evaluate-second"}
    assert [event for event in runs.again.told if isinstance(event, StepFinished)] == []
    for ours, theirs in zip(runs.again.record.stages, runs.ended.record.stages, strict=True):
        assert ours.model_copy(update={"reused_from": None}) == theirs.model_copy(update={"reused_from": None})
    assert runs.again.record.final_model == runs.ended.record.final_model
    said = [event.result for event in runs.again.told if isinstance(event, PhaseFinished) and event.phase == "second"]
    assert said == [f"as in {runs.ended.run}"]
    events = journal.read_events(workspace.run_directory(runs.again.run) / "events.jsonl")
    # The axis of evaluations counts the steps that were made before, whoever made them. Mutation: count those of this run only.
    assert [event.trained_steps for event in events if isinstance(event, journal.EvaluationFinished)] == [0, 100, 102, 105]


def test_the_log_holds_what_every_prompt_scored_at_every_visit(runs: Runs) -> None:
    log, tables = read(runs.whole.output("second") / "scores.jsonl"), runs.whole.told
    assert [step.step for step in log] == [1, 2, 3]
    kept = set(pd.read_parquet(runs.whole.output("rate") / "difficulty.parquet")["prompt"])
    assert all(set(step.prompts) <= kept and step.samples == [4] * 4 for step in log)
    means = [event.metrics["reward/mean"] for event in tables if isinstance(event, StepFinished) and event.stage == "second"]
    assert [sum(step.outcomes) / 4 for step in log] == pytest.approx(means)


def test_ratings_are_those_of_the_stored_samples(runs: Runs) -> None:
    output = runs.whole.output("rate")
    rates, samples = pd.read_parquet(output / "difficulty.parquet"), pd.read_parquet(output / "rollouts")
    assert (len(rates), len(samples)) == (30, 120)
    assert (samples.groupby("prompt")["outcome"].sum().loc[rates["prompt"]].to_numpy() == rates["right"].to_numpy()).all()
    assert 0 < rates["right"].sum() < 120
    assert runs.whole.record.stage("rate").results["pass_rate"] == pytest.approx(rates["rate"].mean())


def test_changed_settings_run_the_stages_that_depend_on_them(runs: Runs) -> None:
    # No engine is needed for these. Mutation: fingerprint the recipe instead of the stage.
    changed = run("20260101-000006", "stages.easy.estimator=latest")
    assert (changed.engines, changed.reused()) == (0, ["sft", "rl", "rate", "second"])
    assert changed.output("easy") != runs.whole.output("easy")


def test_an_output_that_is_damaged_is_named_and_made_anew(runs: Runs) -> None:
    file = runs.whole.output("easy") / "prompts.parquet"
    before = file.read_bytes()
    file.write_bytes(before[:-1] + b"0")
    mended = run("20260101-000007")
    assert mended.reused() == ["sft", "rl", "rate", "second"]
    assert any(isinstance(event, Notice) and f"{file} is not as it was written" in event.text for event in mended.told)
    assert file.read_bytes() == before
    assert run("20260101-000008").reused() == ["sft", "rl", "rate", "second", "easy"]


def test_a_stage_begins_with_the_weights_that_the_one_before_has_exported(runs: Runs) -> None:
    model_directory = Path(runs.whole.record.stage("rl").model or "")
    made_from = json.loads((runs.whole.output("second") / "output.json").read_text())["made_from"]
    assert made_from["weights"] == directory_digest(model_directory)
    # Log-probs of the first step's samples, as transformers computes them from the disk. Mutation: one engine that is an update behind its export.
    directory = step_directory(workspace.run_directory(runs.whole.run), "second", 1)
    (operation,) = [one for one in kept_operations(directory) if one.operator == "log_prob"]
    call = pickle.loads(operation.files[0].read_bytes())
    rollout, found = call.arguments[0].tensors, call.result.tensors["old_log_probs"]
    tokens, attended = rollout["input_ids"], rollout["attention_mask"].long()
    positions = (attended.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
        logits = model(input_ids=tokens, attention_mask=attended, position_ids=positions).logits
    expected = logits[:, :-1].log_softmax(dim=-1).gather(2, tokens[:, 1:, None])[..., 0]
    mask = rollout["response_mask"][:, 1:]
    assert mask.sum() > 20
    assert torch.allclose(found[:, 1:][mask], expected[mask], atol=1e-5)

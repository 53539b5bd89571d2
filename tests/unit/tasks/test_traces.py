"""Traces of a run, and the kept calls of its steps: what is found, and what is said when there is nothing."""

import json
from pathlib import Path

import pytest
from trace_example import example

from engine.control.trace import Trace
from tasks import journal, replaying, traces, workspace
from tasks.compose import compose
from tasks.config import RecipeConfig
from tasks.journal import RunStarted
from tasks.lineage import Lineage
from tasks.record import RunRecord, StageRecord

RUN = "grpo_tiny-20261129-140312"


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    stages = [StageRecord(name=name, kind=kind, steps_planned=9) for name, kind in (("sft", "sft"), ("first", "rl"), ("last", "rl"))]
    return RunRecord(run=RUN, recipe="grpo_tiny", seed=0, stages=stages, lineage=Lineage(configuration_digest="c", seed=0))


def saved(stage: str, step: int) -> Trace:
    found = example(split=False)
    trace = Trace(stage, step, found.operations, found.edges, found.controller, found.controller_bytes, found.batch_bytes)
    traces.save(RUN, trace)
    return trace


def test_the_last_step_of_the_last_stage_is_meant(record: RunRecord) -> None:
    saved("first", 9)
    saved("last", 2)
    newest = saved("last", 10)
    # Mutation: the largest name instead of the largest number would do here, the first stage would not.
    assert traces.load(record, None, None) == newest
    assert traces.load(record, "first", None).step == 9
    assert traces.load(record, None, 2).step == 2


def test_a_stage_that_lay_ready_was_traced_by_the_run_that_made_it(record: RunRecord) -> None:
    trace = saved("last", 3)
    later = record.model_copy(update={"run": "grpo_tiny-20261130-140312"})
    with pytest.raises(ValueError, match="has no traces yet"):
        traces.load(later, None, None)
    later.stages[2].reused_from = RUN
    assert traces.load(later, "last", None) == trace


def test_what_is_not_there_is_said_with_what_is(record: RunRecord) -> None:
    with pytest.raises(ValueError, match="has no traces yet; they are recorded by stages of kind rl"):
        traces.load(record, None, None)
    saved("first", 3)
    saved("first", 4)
    with pytest.raises(ValueError, match="has no traces of a stage 'last'; it has some of: first"):
        traces.load(record, "last", None)
    with pytest.raises(ValueError, match="has no trace of step 5 of stage first; it has steps 3 to 4"):
        traces.load(record, None, 5)
    (workspace.run_directory(RUN) / "traces" / "first" / "step_000004.json").write_text("{")
    with pytest.raises(ValueError, match=r"step_000004\.json is not a trace that this version can read"):
        traces.load(record, None, 4)


def test_three_files_to_look_at_beside_the_recorded_one(record: RunRecord, tmp_path: Path) -> None:
    trace = saved("first", 3)
    written = traces.write(trace, workspace.run_directory(RUN) / "traces" / "first")
    assert [path.name for path in written] == ["step_000003.html", "step_000003.chrome.json", "step_000003.json"]
    assert json.loads(written[1].read_text())["traceEvents"]
    # The Chrome trace is no step of its own. Mutation: count every file that ends in .json.
    assert traces.load(record, None, None) == trace


def keep(stage: str, step: int, *names: str) -> None:
    directory = workspace.run_directory(RUN) / "calls" / stage / f"step_{step:06d}"
    directory.mkdir(parents=True)
    for name in names:
        (directory / f"{name}.pickle").touch()


def test_a_kept_operator_is_found(record: RunRecord) -> None:
    keep("first", 2, "000.actor.generate.0", "000.actor.generate.1", "003.actor.log_prob.1", "003.actor.log_prob.0", "005.actor.advantage.0")
    stage, operation = replaying.find(record, "actor.log_prob", 2, None)
    assert (stage, operation.number, str(operation)) == ("first", 3, "actor.log_prob")
    # By rank, in whatever order the directory lists them.
    assert [path.name for path in operation.files] == ["003.actor.log_prob.0.pickle", "003.actor.log_prob.1.pickle"]


def test_what_was_not_kept_is_said_with_what_was(record: RunRecord) -> None:
    with pytest.raises(ValueError, match=r"kept no calls; set stages\.STAGE\.keep_calls_every_steps=20"):
        replaying.find(record, "actor.log_prob", 2, None)
    keep("first", 2, "000.actor.generate.0")
    with pytest.raises(ValueError, match="did not keep that step; kept are: first 2"):
        replaying.find(record, "actor.log_prob", 3, None)
    with pytest.raises(ValueError, match="did not keep that step; kept are: first 2"):
        replaying.find(record, "actor.log_prob", 2, "last")
    with pytest.raises(ValueError, match=r"step 2 has no operator 'actor\.logprob'; it has: actor\.generate"):
        replaying.find(record, "actor.logprob", 2, None)


def test_the_configuration_is_the_runs_own(record: RunRecord) -> None:
    config: RecipeConfig = compose(["recipe=grpo_tiny", "seed=7", "algorithm@stages.rl.algorithm=ppo"])
    path = workspace.run_directory(RUN) / "events.jsonl"
    path.parent.mkdir(parents=True)
    started = RunStarted(run=RUN, recipe="grpo_tiny", description="", configuration=config.model_dump(mode="json"), lineage={}, tags={})
    journal.append(path, started, 0)
    assert replaying.configuration(record).digest() == config.digest()

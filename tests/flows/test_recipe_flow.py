"""A whole recipe, small, on the real parts: Prefect's temporary server, Ray, vLLM, FSDP2 and MLflow."""

import hashlib
import json
import subprocess
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from metric_names import undocumented
from small_recipe import SMALL, Almanac

from engine.digest import directory_digest
from engine.reshard.ledger import PARTS


@pytest.fixture(scope="module")
def almanac(tmp_path_factory: pytest.TempPathFactory) -> Almanac:
    return Almanac(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def ran(almanac: Almanac) -> subprocess.CompletedProcess[str]:
    return almanac("run", *SMALL)


@pytest.fixture(scope="module")
def shown(almanac: Almanac, ran: subprocess.CompletedProcess[str]) -> dict:
    assert ran.returncode == 0, ran.stdout + ran.stderr
    done = almanac("show", "latest", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_terminal_shows_progress_and_a_table_and_no_library_logs(ran: subprocess.CompletedProcess[str], shown: dict) -> None:
    assert ran.stderr == ""
    for text in (
        "start engine: done",
        "sft: 100/100",
        "rl: 2/2",
        "evaluate rl: done",
        "Accuracy on the test set",
        "Weights, per synchronisation",
        "almanac ui",
    ):
        assert text in ran.stdout
    assert not [word for word in ("INFO", "WARNING", "prefect.", "Traceback") if word in ran.stdout]
    log = Path(shown["log_file"])
    assert f"log: {log}" in ran.stdout
    assert "Beginning flow run" in log.read_text()


def test_the_record_holds_what_the_run_did(shown: dict, almanac: Almanac) -> None:
    assert (shown["status"], shown["recipe"], shown["error"]) == ("finished", "grpo_tiny", None)
    sft, rl = shown["stages"]
    assert (sft["name"], sft["steps"], sft["status"]) == ("sft", 100, "finished")
    assert (rl["name"], rl["steps"], rl["status"]) == ("rl", 2, "finished")
    # One evaluation is the end of one stage and the beginning of the next.
    assert rl["accuracy_before"] == sft["accuracy_after"]
    assert sft["accuracy_before"] == 0.0
    assert sft["accuracy_after"] > 0.0
    for stage in (sft, rl):
        assert stage["interval"][0] <= stage["accuracy_after"] <= stage["interval"][1]
        assert stage["gain"] == pytest.approx(stage["accuracy_after"] - stage["accuracy_before"])
        assert stage["seconds"] > 0
        assert stage["tokens_per_second"] > 0
        assert set(stage["by_difficulty"]) == {"2"}
        assert Path(stage["model"]).is_dir()
    assert {"generate", "reward", "log_prob", "update", "synchronise"} <= set(rl["seconds_by_phase"])
    # SFT ends in one, every RL step in one; there are two ranks, and a row of the table for each stage.
    for stage, count in ((sft, 1), (rl, 2)):
        found = stage["synchronisations"]
        assert (found["count"], len(found["ranks"])) == (count, 2)
        assert all(0 < rank["bytes_minimum"] <= rank["bytes_received"] for rank in found["ranks"])
        parts = sum(rank[f"{part}_seconds"] for rank in found["ranks"] for part in PARTS)
        assert 0 < parts <= sum(rank["seconds"] for rank in found["ranks"])
    lineage = shown["lineage"]
    assert set(lineage["dataset_digests"]) == {"sft", "train", "validation", "test"}
    assert len(lineage["base_model_digest"]) == 64
    assert shown["final_model"] == rl["model"]


def test_mlflow_holds_a_parent_with_a_child_for_each_stage(shown: dict) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(shown["mlflow"]["tracking_uri"])
    parent = client.get_run(shown["mlflow"]["run_id"])
    assert (parent.info.run_name, parent.info.status) == (shown["run"], "FINISHED")
    children = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert {child.info.run_name: child.info.status for child in children} == dict.fromkeys(["sft", "rl", "evaluation"], "FINISHED")
    rl = next(child for child in children if child.info.run_name == "rl")
    assert len(client.get_metric_history(rl.info.run_id, "reward/mean")) == 2
    models = client.search_logged_models([parent.info.experiment_id])
    trained = {child.info.run_id for child in children if child.info.run_name != "evaluation"}
    assert {model.source_run_id for model in models} == {*trained, parent.info.run_id}, "the parent's is the base model"
    assert [one.model_id for one in parent.inputs.model_inputs] == [one.model_id for one in models if one.source_run_id == parent.info.run_id]
    assert undocumented(name for run in children for name in run.data.metrics) == []
    train = next(found for found in parent.inputs.dataset_inputs if found.dataset.name == "grpo_tiny/train")
    file = Path(json.loads(train.dataset.source)["uri"])
    assert hashlib.md5(file.read_bytes()).hexdigest() in {tag.value for tag in train.tags}
    assert "prompt" in {column["name"] for column in json.loads(train.dataset.schema)["mlflow_colspec"]}


def test_a_model_is_followed_back_to_its_data(shown: dict, almanac: Almanac) -> None:
    done = almanac("lineage", shown["final_model"], "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    lineage, (sft, rl) = told["lineage"], told["stages"]
    assert (told["run"], [sft["stage"], rl["stage"]], [sft["trouble"], rl["trouble"]]) == (shown["run"], ["sft", "rl"], [None, None])
    # Each stage began with the weights that the one before it has left, the first one with the base model.
    assert [sft["made_from"]["weights"], rl["made_from"]["weights"]] == [lineage["base_model_digest"], sft["model_digest"]]
    assert [sft["made_from"]["inputs"], rl["made_from"]["inputs"]] == [{split: lineage["dataset_digests"][split]} for split in ("sft", "train")]
    data = almanac.root / "data" / "grpo_tiny" / "train.parquet"
    assert lineage["dataset_digests"]["train"] == hashlib.sha256(data.read_bytes()).hexdigest()
    assert rl["model_digest"] == directory_digest(Path(shown["final_model"]))
    assert rl["accuracy_after"] == shown["stages"][1]["accuracy_after"]


def test_the_run_has_a_page_of_its_own(shown: dict) -> None:
    from mlflow import MlflowClient

    page = (Path(shown["log_file"]).parent / "report.html").read_text()
    for text in (f"{100 * shown['stages'][1]['accuracy_after']:.1f}", shown["lineage"]["base_model_digest"], 'class="graph"', "checks passed"):
        assert text in page
    client = MlflowClient(shown["mlflow"]["tracking_uri"])
    assert [item.path for item in client.list_artifacts(shown["mlflow"]["run_id"], "report")] == ["report/report.html"]


def test_the_final_model_is_an_ordinary_one_with_the_accuracy_that_was_recorded(shown: dict, almanac: Almanac) -> None:
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(shown["final_model"]).config.model_type == "qwen3"
    done = almanac("evaluate", shown["final_model"], "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rl = shown["stages"][1]
    # Same weights, prompts and seeds. Mutation: an export that is one update behind changes some of the sixty answers.
    assert found["avg@2"]["mean"] == rl["accuracy_after"]
    assert found["avg@2"]["interval"] == rl["interval"]
    assert found["greedy"]["mean"] == rl["greedy_after"]


def test_the_dataflow_of_each_step_is_there_to_be_looked_at(shown: dict, almanac: Almanac, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    done = almanac("trace", "--step", "1", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / f"step_000001{ending}") for ending in (".html", ".chrome.json", ".json")]
    trace = json.loads((tmp_path / "step_000001.json").read_text())
    assert (trace["stage"], trace["step"]) == ("rl", 1)
    assert {"generate", "score", "log_prob", "update", "synchronise"} <= {operation["operator"] for operation in trace["operations"]}
    assert any(event["ph"] == "X" for event in json.loads((tmp_path / "step_000001.chrome.json").read_text())["traceEvents"])
    # MLflow has those of the first and the last step, with the stage and with the run.
    client = MlflowClient(shown["mlflow"]["tracking_uri"])
    parent = client.get_run(shown["mlflow"]["run_id"])
    names = {file.path for file in client.list_artifacts(parent.info.run_id, "traces/rl")}
    assert names == {f"traces/rl/step_00000{step}{ending}" for step in (1, 2) for ending in (".html", ".chrome.json", ".json")}
    refused = almanac("trace", "--step", "7")
    assert refused.returncode == 2
    assert "has no trace of step 7 of stage rl; it has steps 1 to 2" in refused.stderr


def test_an_operator_can_be_run_again_alone(shown: dict, almanac: Almanac) -> None:
    # The last step, after updates: the weights are those that the step began with. Mutation: replay on the first weights.
    done = almanac("replay", "--step", "2", "--operator", "actor.log_prob")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "old_log_probs" in done.stdout
    assert "equal" in done.stdout
    refused = almanac("replay", "--step", "2", "--operator", "actor.logprob")
    assert refused.returncode == 2
    assert "has no operator 'actor.logprob'; it has: actor.generate" in refused.stderr


def test_easy_prompts_of_a_stage_are_left_out_from_the_command_line(shown: dict, almanac: Almanac, tmp_path: Path) -> None:
    target = tmp_path / "kept.parquet"
    done = almanac("drop-easy", shown["run"], "--stage", "rl", "--threshold", "0.2", "--output", str(target), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Two steps of four prompts each, and a hundred to train on.
    assert (found["prompts"], found["visited"]) == (100, 8)
    assert 0 < found["dropped"] <= 8
    assert len(parquet.read_table(target)) == found["kept"] == 100 - found["dropped"]
    refused = almanac("drop-easy", shown["run"], "--stage", "sft")
    assert refused.returncode == 2
    assert "has no stage sft of kind rl that has ended; it has: rl" in refused.stderr


def test_the_difficulty_of_prompts_is_found_from_the_command_line(shown: dict, almanac: Almanac) -> None:
    settings = [*SMALL, "stages.rl.sampling.temperature=0.6"]
    done = almanac("difficulty", shown["final_model"], "--json", *settings)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["stage"], found["prompts"], sum(found["prompts_by_right_samples"])) == ("difficulty", 100, 100)
    assert found["kept"] == sum(found["prompts_by_right_samples"][:-1])
    assert 0 < found["pass_rate"] < 1
    assert len(parquet.read_table(Path(found["output"]) / "prompts.parquet")) == found["kept"]
    # The same once more is what lies there. Mutation: a fingerprint with something in it that differs from call to call.
    again = almanac("difficulty", shown["final_model"], *settings)
    assert again.returncode == 0, again.stderr
    assert "start engine: started" not in again.stderr
    assert "difficulty: done in" in again.stderr
    assert f"{found['output']}" in again.stdout


def test_the_same_recipe_again_runs_nothing(shown: dict, almanac: Almanac) -> None:
    done = almanac("run", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "start engine: started" not in done.stdout
    assert "Lay ready and were not run again" in done.stdout
    again = json.loads(almanac("show", "latest", "--json").stdout)
    assert again["run"] != shown["run"]
    assert [stage["reused_from"] for stage in again["stages"]] == [shown["run"]] * 2
    for ours, theirs in zip(again["stages"], shown["stages"], strict=True):
        assert ours | {"reused_from": None} == theirs
    # Its dataflow is that of the run that made it.
    assert almanac("trace", "--step", "1", "--output", str(almanac.root / "trace")).returncode == 0


@pytest.fixture
def overlapping(almanac: Almanac) -> list[str]:
    """Settings of a recipe on files whose test prompt stands in train as well."""
    row = {
        "prompt": [{"role": "user", "content": "1 + 2 ="}],
        "data_source": "chain_sum",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {},
    }
    other = row | {"prompt": [{"role": "user", "content": "4 + 5 ="}]}
    (almanac.root / "train.jsonl").write_text("\n".join(json.dumps(line) for line in (other, row)))
    (almanac.root / "test.jsonl").write_text(json.dumps(row))
    return ["recipe=grpo_tiny", "~stages.sft", "data=files", "data.train_file=train.jsonl", "data.test_file=test.jsonl"]


def test_bad_data_end_the_run_with_2_and_leave_nothing_half_written(almanac: Almanac, overlapping: list[str]) -> None:
    from mlflow import MlflowClient

    done = almanac("run", *overlapping, "name=overlapping")
    assert done.returncode == 2
    assert "test.jsonl" in done.stderr
    assert "row 0" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    shown = json.loads(almanac("show", "latest", "--json").stdout)
    assert (shown["status"], shown["stages"][0]["status"]) == ("failed", "planned")
    assert "test.jsonl" in shown["error"]
    assert "Traceback" in Path(shown["log_file"]).read_text()
    assert not (almanac.root / "data" / "overlapping").exists()
    run = MlflowClient(shown["mlflow"]["tracking_uri"]).get_run(shown["mlflow"]["run_id"])
    assert run.info.status == "FAILED"


# Mutation: leave `validate_data` out of the flow, or refuse before the pages are logged.
def test_unfit_data_end_the_run_with_2_and_say_why_in_mlflow(almanac: Almanac, shown: dict, overlapping: list[str]) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(shown["mlflow"]["tracking_uri"])
    pages = {"data_quality/index.html", "data_quality/summary.json", "data_quality/data_docs"}
    assert {file.path for file in client.list_artifacts(shown["mlflow"]["run_id"], "data_quality")} == pages
    row = json.loads((almanac.root / "test.jsonl").read_text())
    # Two of them: one may be taken out for validation.
    train = [row | {"prompt": text} for text in ("4 + 5 =", "What is 1 + 2 = ?", "Tell me 1 + 2 = now")]
    (almanac.root / "train.jsonl").write_text("\n".join(json.dumps(line) for line in train))
    done = almanac("run", *overlapping, "name=unfit")
    assert done.returncode == 2
    assert "test: 1 rows share a run of words with what is learnt from" in done.stderr
    failed = json.loads(almanac("show", "latest", "--json").stdout)
    # Mutation: evaluate beside the verdict, and not only start the engine: a large model is then asked for an hour about data that nobody may use.
    assert "Evaluation" not in (almanac.root / ".work" / "runs" / failed["run"] / "events.jsonl").read_text()
    assert {file.path for file in client.list_artifacts(failed["mlflow"]["run_id"], "data_quality")} == pages
    assert almanac("validate", *overlapping, "name=unfit").returncode == 1

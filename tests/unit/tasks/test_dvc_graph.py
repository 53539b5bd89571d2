"""dvc.yaml: in step with the recipe, of the same parts as a run, and out of date exactly where a fingerprint is another."""

import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks import dvc_graph, dvc_stage, fingerprint, workspace
from tasks.compose import choices, compose, write_resolved
from tasks.config import RecipeConfig
from tasks.dvc_graph import EVALUATE, PREPARE, REPORT, VALIDATE
from tasks.problems import ConfigurationError
from tasks.progress import CREATE_MODEL, FINISH, PREPARE_DATA, START_ENGINE, START_PREFECT, VALIDATE_DATA, planned_phases
from tasks.stage_config import references

TINY = ["recipe=grpo_tiny"]
RATE = "stages.rate={kind: difficulty, max_prompt_tokens: 40, max_response_tokens: 20, samples_per_prompt: 4}"
EASY = "stages.easy={kind: drop_easy, scores_of: [rl], prompts: rate}"
AGAIN = (
    "stages.again={kind: rl, prompts: easy, steps: 2, prompts_per_step: 4, max_prompt_tokens: 40, max_response_tokens: 16, "
    "training: {optimizer: {learning_rate: 1e-4}}}"
)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, which is its own root; conf/ stays where it is."""
    there = workspace.conf_directory()
    monkeypatch.delenv("ALMANAC_ROOT", raising=False)
    monkeypatch.setattr(workspace, "checkout", lambda: tmp_path)
    monkeypatch.setattr("tasks.compose.conf_directory", lambda: there)
    return tmp_path


def depends_on(config: RecipeConfig, unit: str) -> tuple[dict[str, Any], list[str]]:
    """Values of the settings that a DVC stage names, and the files."""
    stage, settings = dvc_graph.graph(config)["stages"][unit], config.model_dump(mode="json")
    values = {}
    for key in stage["params"]:
        value: Any = settings
        for part in key.split("."):
            value = value[part]
        values[key] = value
    return values, stage["deps"]


def test_the_files_in_the_repository_are_what_the_recipe_makes_them() -> None:
    # Mutation: change a value in conf/recipe/, or a stage in dvc.yaml, without `make dvc`.
    assert dvc_graph.differences(compose([f"recipe={dvc_graph.read_params().name}"])) == []


def test_what_git_does_not_keep_dvc_does() -> None:
    """Outputs are ignored by git, their metrics are not; else `dvc repro` writes a .gitignore, or git holds the weights."""
    stages = yaml.safe_load(dvc_graph.graph_file().read_text())["stages"].values()
    outs = [out for stage in stages for out in stage["outs"]]
    metrics = [next(iter(entry)) for stage in stages for entry in stage.get("metrics", [])]
    done = subprocess.run(["git", "check-ignore", *(f"{out}/" for out in outs), *metrics], cwd=workspace.checkout(), capture_output=True, text=True)
    if done.returncode == 128:
        pytest.skip("the checkout is no git repository")
    assert [line.rstrip("/") for line in done.stdout.split()] == outs


@pytest.mark.parametrize("recipe", choices("recipe"))
def test_dvc_has_the_parts_of_a_run_in_its_order(recipe: str) -> None:
    config = compose([f"recipe={recipe}"])
    told = {PREPARE: PREPARE_DATA, VALIDATE: VALIDATE_DATA, REPORT: FINISH}
    units = [told.get(unit, unit.replace(EVALUATE, "evaluate ")) for unit in dvc_graph.units(config)]
    assert units == [phase for phase in planned_phases(config, list(config.stages)) if phase not in (START_PREFECT, CREATE_MODEL, START_ENGINE)]
    stages = dvc_graph.graph(config)["stages"]
    assert list(stages) == dvc_graph.units(config)
    # What a stage takes from another is an output of one before it. Mutation: weights of the next stage in place of the last one.
    for place, stage in enumerate(stages.values()):
        outs = [out for before in list(stages.values())[:place] for out in [*before["outs"], *(key for m in before.get("metrics", []) for key in m)]]
        taken = [dep for dep in stage["deps"] if dep.startswith(("results/", f"data/{config.name}"))]
        assert all(any(dep == out or dep.startswith(f"{out}/") for out in outs) for dep in taken)
        assert place == 0 or taken


def test_a_stage_depends_on_the_weights_and_the_files_that_it_takes() -> None:
    config = compose([*TINY, RATE, EASY, AGAIN])
    deps = {unit: set(stage["deps"]) for unit, stage in dvc_graph.graph(config)["stages"].items()}

    def output(unit: str, file: str) -> str:
        return f"results/grpo_tiny/{unit}/output/{file}"

    assert {"data/grpo_tiny/train.parquet", output("sft", "model"), "engine"} <= deps["rl"]
    assert {"data/grpo_tiny/train.parquet", output("rl", "model"), "tasks/difficulty.py", "tasks/prompt_files.py"} <= deps["rate"]
    # No engine: neither weights nor its source.
    assert deps["easy"] == {output("rate", "prompts.parquet"), output("rl", "scores.jsonl"), "tasks/drop_easy.py", "tasks/prompt_files.py"}
    # Its weights are those of the stage that trained last. Mutation: of the stage just before.
    assert {output("easy", "prompts.parquet"), output("rl", "model")} <= deps["again"]
    assert "data/grpo_tiny/train.parquet" not in deps["again"]
    assert list(references(config.stages["again"])) == [("prompts", "easy")]


@pytest.mark.parametrize(
    "override",
    [
        "stages.rl.steps=44",
        "stages.sft.training.optimizer.learning_rate=1e-3",
        "stages.rl.sampling.temperature=1.1",
        "algorithm@stages.rl.algorithm=gspo",
        "evaluation.samples_per_prompt=4",
        "evaluation_reward.default=exact_match",
        "seed=1",
        "rollout.max_concurrent_samples=7",
        "resources=one_cpu",
        "training.gradient_checkpointing=true",
        "model.dtype=bfloat16",
        "resources.call_deadline_seconds=60",
        "tracking.samples_per_table=3",
        "minimum_free_disk_gigabytes=0",
        "description=other",
        "stages.rl.max_response_tokens=100",
    ],
)
def test_a_setting_concerns_dvc_where_it_changes_a_fingerprint(override: str) -> None:
    """Mutations: leave `rollout`, `seed` or the ranks out of what a stage depends on; name all of `stages` or `resources`."""
    before, after = compose(TINY), compose([*TINY, override])

    def changed(unit: str) -> bool:
        return depends_on(before, unit) != depends_on(after, unit)

    for name in before.stages:
        assert changed(name) is (fingerprint.of_stage(before, name, "w", {}) != fingerprint.of_stage(after, name, "w", {})), name
    scores = fingerprint.of_evaluation(before, "w", "t") != fingerprint.of_evaluation(after, "w", "t")
    assert [changed(f"{EVALUATE}{label}") for label in ("base", "sft", "rl")] == [scores] * 3


@pytest.mark.parametrize(
    ("override", "units"),
    [
        # Intervals are made anew of the same samples.
        ("evaluation.bootstrap_resamples=10", ["evaluate-base", "evaluate-sft", "evaluate-rl", REPORT]),
        ("data.chain_sum.test_rows=270", [PREPARE]),
        ("data.checks.minimum_rows=2", [VALIDATE]),
        ("stages.rl.max_prompt_tokens=41", [PREPARE, VALIDATE, "rl"]),
    ],
)
def test_what_is_no_training_has_its_settings_too(override: str, units: list[str]) -> None:
    before, after = compose(TINY), compose([*TINY, override])
    assert [unit for unit in dvc_graph.units(before) if depends_on(before, unit) != depends_on(after, unit)] == units


def test_the_source_of_a_function_of_ones_own_is_a_dependency(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(checkout))
    (checkout / "own_reward_for_dvc.py").write_text("def score(response, ground_truth):\n    return 1.0\n")
    config = compose([*TINY, "stages.rl.reward.default=own_reward_for_dvc:score"])
    with_it = [unit for unit in dvc_graph.units(config) if "own_reward_for_dvc.py" in depends_on(config, unit)[1]]
    assert with_it == [VALIDATE, "rl"]


def test_files_of_ones_own_are_dependencies() -> None:
    # The file need not be there yet. Mutation: name the prepared splits only.
    config = compose([*TINY, "~stages.sft", "data=files", "data.train_file=my/train.jsonl"])
    assert "my/train.jsonl" in depends_on(config, PREPARE)[1]


def test_without_checks_there_is_no_verdict_to_wait_for() -> None:
    stages = dvc_graph.graph(compose([*TINY, "data.quality=off"]))["stages"]
    assert VALIDATE not in stages
    assert not any("validate" in dep for stage in stages.values() for dep in stage["deps"])


def test_a_stage_may_not_have_a_name_of_dvcs() -> None:
    with pytest.raises(ConfigurationError, match=r"stages\.report"):
        dvc_graph.graph(compose([*TINY, RATE.replace("rate", "report")]))


def test_writing_says_what_has_changed_and_checking_where(checkout: Path) -> None:
    with pytest.raises(ConfigurationError, match="almanac dvc recipe=NAME"):
        dvc_graph.read_params()
    written = [checkout / "params.yaml", checkout / "dvc.yaml"]
    assert dvc_graph.write(compose(TINY)) == written
    assert dvc_graph.write(compose(TINY)) == []
    assert dvc_graph.read_params() == compose(TINY)
    # A value is a matter of params.yaml alone.
    changed = compose([*TINY, "stages.rl.steps=3"])
    assert dvc_graph.differences(changed) == ["params.yaml: stages.rl.steps is 45, and 3 in the recipe"]
    assert dvc_graph.write(changed) == written[:1]
    assert dvc_graph.behind(changed) == []
    # Another stage is one of dvc.yaml too.
    assert dvc_graph.behind(compose([*TINY, EASY.replace(", prompts: rate", "")])) == ["easy"]
    (checkout / "dvc.yaml").write_text((checkout / "dvc.yaml").read_text().replace("engine\n", "engines\n", 1))
    assert dvc_graph.differences(changed) == ["dvc.yaml: evaluate-base"]
    (checkout / "dvc.yaml").write_text("stages: [")
    assert dvc_graph.behind(changed) == dvc_graph.units(changed)


def test_numbers_as_dvc_writes_them_are_read(checkout: Path) -> None:
    """`--set-param ...=1e-5` is written as `1e-05`, which is text to YAML 1.1."""
    write_resolved(compose(TINY), dvc_graph.params_file())
    params = dvc_graph.params_file().read_text()
    assert params.count("learning_rate: 0.0001\n") == 1
    dvc_graph.params_file().write_text(params.replace("learning_rate: 0.0001\n", "learning_rate: 1e-05\n"))
    assert dvc_graph.read_params() == compose([*TINY, "stages.rl.training.optimizer.learning_rate=1e-5"])
    # Mutation: only the reader knows such numbers; text that looks like one would come back as a number.
    config = compose([*TINY, "description='1e5'"])
    write_resolved(config, dvc_graph.params_file())
    assert dvc_graph.read_params() == config


def test_a_stage_that_cannot_be_what_dvc_thinks_does_not_run(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dvc_graph.write(compose(TINY))
    for arguments, said in (([], "the name of one stage"), (["r1"], "r1 is no stage of the recipe in params.yaml; there are: prepare, validate")):
        with pytest.raises(SystemExit, match=said):
            dvc_stage.main(arguments)
    # Without checks the stages depend on no verdict. Mutation: run it all the same; dvc.lock would name dependencies that are not those.
    write_resolved(compose([*TINY, "data.quality=off"]), dvc_graph.params_file())
    with pytest.raises(SystemExit, match=r"stage sft of dvc\.yaml is not what params\.yaml makes it; run `almanac dvc`"):
        dvc_stage.main(["sft"])
    monkeypatch.setenv("ALMANAC_ROOT", str(checkout / "elsewhere"))
    with pytest.raises(SystemExit, match="unset ALMANAC_ROOT"):
        dvc_stage.main(["sft"])
    assert not (checkout / ".work").exists()


def test_plots_are_of_stages_that_have_them() -> None:
    plots = dvc_graph.graph(compose([*TINY, RATE, EASY, AGAIN]))["plots"]
    curves = {title: list(plot["y"]) for entry in plots if isinstance(entry, dict) for title, plot in entry.items()}
    assert curves["Reward"] == [f"results/grpo_tiny/{name}/output/steps.csv" for name in ("rl", "again")]
    assert curves["SFT loss"] == ["results/grpo_tiny/sft/output/steps.csv"]
    assert all(earlier != later for earlier, later in pairwise(plots))
    assert "results/grpo_tiny/rate/output/histogram.png" in plots

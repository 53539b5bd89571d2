"""Preflight: shipped recipes pass, and what a run would stumble over is found beforehand, everything at once."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks import preflight as module
from tasks.compose import choices, compose
from tasks.preflight import Finding, preflight
from tasks.workspace import checkout

FILES = ["recipe=grpo_tiny", "data=files", "~stages.sft"]
ROW = {
    "prompt": [{"role": "user", "content": "1 + 1 ="}],
    "data_source": "chain_sum",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0},
}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's root of its own, on a machine of two cores and no GPU."""
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(module, "cores", lambda: 2)
    monkeypatch.setattr(module, "gpus", list)
    monkeypatch.setattr(module, "torch_has_cuda", lambda: False)
    return tmp_path


def found(*overrides: str, level: str = "") -> list[Finding]:
    """Of a level; without one, whatever would stop a run here."""
    return [finding for finding in preflight(compose(list(overrides))) if finding.level == level or (not level and finding.level != "warning")]


def keys(findings: list[Finding]) -> list[str]:
    return [finding.key for finding in findings]


def write_parquet(path: Path, rows: list[dict]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize("recipe", sorted(choices("recipe")))
def test_every_shipped_recipe_passes(recipe: str) -> None:
    """A recipe for GPUs is right here too; what it lacks are devices, data and disk. Mutations: `error` for any of these."""
    findings = preflight(compose([f"recipe={recipe}"]))
    assert not [finding for finding in findings if finding.level == "error"]
    lacking = {finding.key.partition(".")[0] for finding in findings if finding.level == "missing"}
    assert lacking <= {"resources", "data", "minimum_free_disk_gigabytes"}
    assert bool(lacking) == (compose([f"recipe={recipe}"]).resources.device == "cuda")
    # The weights of a public model are fetched by the run, as long as nobody names a directory.
    assert {finding.key for finding in findings if finding.level == "warning"} <= {"model.path"}


@pytest.mark.parametrize("recipe", sorted(choices("recipe")))
def test_preflight_of_a_shipped_recipe_ends_with_0_and_without_torch(recipe: str, root: Path) -> None:
    """On a machine without GPU, data and model. Mutation: `import torch` at the top of any module on the way."""
    code = (
        "import sys; from flows.cli import main\n"
        f"code = main(['preflight', 'recipe={recipe}'])\n"
        "sys.exit(99 if {'torch', 'vllm', 'ray', 'mlflow', 'prefect', 'transformers', 'pandera', 'pandas'} & set(sys.modules) else code)"
    )
    environment = os.environ | {"ALMANAC_ROOT": str(root), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout(), env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith((f"{recipe} is ", "warning: "))


@pytest.mark.parametrize("algorithm", sorted(choices("algorithm")))
def test_every_shipped_algorithm_is_one_override_and_passes(algorithm: str) -> None:
    config = compose(["recipe=grpo_tiny", f"algorithm@stages.rl.algorithm={algorithm}"])
    assert preflight(config) == []
    # Mutation: a file that sets nothing, or what another one sets. (OPO's loss is REINFORCE's, and so on: the whole must differ.)
    others = [compose(["recipe=grpo_tiny", f"algorithm@stages.rl.algorithm={other}"]) for other in ("grpo", "dapo") if other != algorithm]
    assert all(other.rl_stages() != config.rl_stages() for other in others)


def test_composing_and_preflighting_import_nothing_heavy() -> None:
    """Checking a recipe takes a second, not the ten that torch takes. Mutation: `import torch` at the top of any module on the way."""
    code = (
        "import sys; from tasks.compose import compose; from tasks.preflight import preflight\n"
        "preflight(compose(['recipe=smollm2_sums']))\n"
        "print(sorted({'torch', 'vllm', 'ray', 'mlflow', 'prefect', 'transformers', 'pandera', 'pandas'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=checkout(), capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_more_ranks_than_cores_names_key_and_resource() -> None:
    """Mutation: leave `cpus_per_rank` out of the product, and the second is not found."""
    (finding,) = found("recipe=grpo_tiny", "resources.ranks=4")
    assert finding.key == "resources.ranks"
    assert "4 of Ray's resource CPU, and this machine has 2" in finding.text
    assert keys(found("recipe=grpo_tiny", "resources.cpus_per_rank=2")) == ["resources.ranks"]


def test_what_all_pools_want_together_is_counted() -> None:
    # Shares of a core add up. Mutation: the main pool alone.
    assert found("recipe=grpo_tiny", "algorithm@stages.rl.algorithm=ppo", "resources=split") == []
    (finding,) = found("recipe=grpo_tiny", "algorithm@stages.rl.algorithm=ppo", "resources=split", "resources.pools.critics.ranks=9")
    assert "9 ranks of resources.pools.critics.cpus_per_rank=0.25" in finding.text
    # Without a critic its pool is not opened. Mutation: count pools that no role sits in.
    assert found("recipe=grpo_tiny", "resources=split", "resources.pools.critics.ranks=9") == []


def test_custom_resources_need_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys(found("recipe=grpo_tiny", "+resources.ray_resources_per_rank.moon=1.0")) == ["resources.ray_resources_per_rank"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert found("recipe=grpo_tiny", "+resources.ray_resources_per_rank.moon=1.0") == []


def test_a_cluster_is_asked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert found("recipe=grpo_tiny", "resources.ranks=4") == []


def test_cuda_without_gpu_or_without_cuda_pytorch() -> None:
    assert keys(found("recipe=grpo_tiny", "resources=one_gpu")) == ["resources.device", "resources.ranks"]


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(module, "gpus", lambda: ["NVIDIA H100"])
    assert found("recipe=grpo_tiny", "resources=one_gpu") == []
    (finding,) = found("recipe=grpo_tiny", "resources=one_gpu", "resources.ranks=2")
    assert "2 of Ray's resource GPU, and 1 are visible" in finding.text


def test_good_files_pass(root: Path) -> None:
    write_parquet(root / "train.parquet", [ROW])
    (root / "test.jsonl").write_text("\n" + json.dumps(ROW) + "\n")
    assert found(*FILES, "data.train_file=train.parquet", "data.test_file=test.jsonl") == []
    assert found(*FILES, f"data.train_file={root}/train.parquet") == []


def test_bad_files_are_found_together(root: Path) -> None:
    """Mutation: read columns only of files with rows, or stop at the first bad file."""
    (root / "empty.parquet").touch()
    (root / "folder.jsonl").mkdir()
    (root / "sft.xls").write_text("a,b\n")
    overrides = ["data.train_file=missing.parquet", "data.validation_file=empty.parquet", "data.test_file=folder.jsonl", "data.sft_file=sft.xls"]
    assert [str(finding) for finding in found(*FILES, *overrides)] == [
        f"data.validation_file: {root}/empty.parquet is empty (0 bytes)",
        f"data.test_file: {root}/folder.jsonl is a directory without state.json, so datasets.save_to_disk did not write it; "
        "name a file (.parquet, .jsonl, .json, .csv)",
        f"data.sft_file: {root}/sft.xls has the extension '.xls'; data are .parquet, .jsonl, .json, .csv, "
        "or a directory that datasets.save_to_disk wrote",
        f"data.train_file: {root}/missing.parquet does not exist; relative paths start at the root",
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("train.parquet", b"PAR1 no", "cannot be read as parquet"),
        ("train.jsonl", b"{broken\n", "cannot be read as jsonl"),
        ("train.jsonl", b"\xff\xfe\n", "cannot be read as jsonl"),
        ("train.jsonl", b"[1]\n", "its first line is not a JSON object"),
        ("train.jsonl", b"\n \n", "has no rows"),
    ],
)
def test_a_file_that_is_not_what_it_says(root: Path, name: str, content: bytes, reason: str) -> None:
    (root / name).write_bytes(content)
    (finding,) = found(*FILES, f"data.train_file={name}")
    assert finding.key == "data.train_file"
    assert reason in finding.text


def test_parquet_without_a_row_or_a_column(root: Path) -> None:
    lacking = {name: value for name, value in ROW.items() if name not in ("ability", "reward_model")}
    write_parquet(root / "lacking.parquet", [lacking])
    pq.write_table(pa.Table.from_pylist([ROW]).slice(0, 0), root / "none.parquet")
    findings = found(*FILES, "data.train_file=lacking.parquet", "data.test_file=none.parquet")
    assert [finding.text.split(";")[0] for finding in findings] == [
        f"{root}/lacking.parquet lacks the column ability",
        f"{root}/lacking.parquet lacks the column reward_model.ground_truth",
        f"{root}/none.parquet has no rows",
    ]


def test_gguf_package_and_file() -> None:
    assert "run `make setup`" in found("recipe=smollm2_sums", "model.gguf.package=no_such_package")[0].text
    assert "its GGUF files: SmolLM2-135M-Instruct.Q4_1.gguf" in found("recipe=smollm2_sums", "model.gguf.file=other.gguf")[0].text


def test_model_path(root: Path) -> None:
    recipe = ["recipe=smollm2_sums", "model.gguf=null"]
    (root / "file").touch()
    (root / "empty").mkdir()
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text("{}")
    assert preflight(compose([*recipe, f"model.path={root}/model"])) == []
    for path in (f"{root}/file", f"{root}/empty", f"{root}/none", "./none", "a/b/c"):
        assert keys(found(*recipe, f"model.path={path}")) == ["model.path"], path
    for name in ("Qwen/Qwen3-0.6B", "gpt2"):
        assert found(*recipe, f"model.path={name}") == []
        assert keys(found(*recipe, f"model.path={name}", level="warning")) == ["model.path"]


def test_free_disk() -> None:
    (finding,) = found("recipe=grpo_tiny", "minimum_free_disk_gigabytes=1e9")
    assert finding.key == "minimum_free_disk_gigabytes"


def test_records_that_cannot_be_written(root: Path) -> None:
    """A file where the directory should be: root may write anywhere, so that permission bits prove nothing here."""
    (root / "mlruns").write_text("")
    (finding,) = found("recipe=grpo_tiny")
    assert finding.key == f"{root}/mlruns"
    assert "cannot be written" in finding.text


def test_a_root_that_does_not_exist_yet_is_no_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALMANAC_ROOT", str(root / "new" / "place"))
    assert found("recipe=grpo_tiny") == []


@pytest.mark.parametrize(("loss", "updates", "warned"), [("reinforce", 2, True), ("gpg", 2, True), ("reinforce", 1, False), ("ppo", 2, False)])
def test_several_updates_with_a_loss_that_has_no_ratio_are_suspicious(loss: str, updates: int, warned: bool) -> None:
    # Mutation: a list of names in place of the fact in the class.
    findings = found("recipe=grpo_tiny", f"stages.rl.algorithm.loss.name={loss}", f"stages.rl.updates_per_step={updates}", level="warning")
    assert keys(findings) == ["stages.rl.algorithm.loss.name"] * warned


def test_what_is_suspicious_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.hardware.cpu_has_bfloat16", lambda: True)
    overrides = ["~stages.sft", "stages.rl.training.optimizer.warmup_steps=100", "resources.device=cpu", "model.dtype=auto"]
    findings = found("recipe=grpo_tiny", *overrides, level="warning")
    assert keys(findings) == ["stages.rl", "stages.rl.training.optimizer.warmup_steps", "rollout.max_log_prob_difference"]
    assert found("recipe=grpo_tiny", *overrides) == []


def test_errors_come_first_and_what_is_missing_before_warnings(root: Path) -> None:
    (root / "test.jsonl").mkdir()
    files = ["data=files", "data.train_file=train.jsonl", "data.test_file=test.jsonl", "~stages.sft"]
    findings = preflight(compose(["recipe=grpo_tiny", *files, "resources.ranks=4"]))
    assert [(finding.level, finding.key) for finding in findings] == [
        ("error", "data.test_file"),
        ("missing", "data.train_file"),
        ("missing", "resources.ranks"),
        ("warning", "stages.rl"),
    ]


@pytest.mark.parametrize("lacking", [["resources.ranks=4"], ["resources=one_gpu"], ["minimum_free_disk_gigabytes=1e9"]])
def test_what_only_this_machine_lacks_is_told_apart(lacking: list[str]) -> None:
    assert {finding.level for finding in found("recipe=grpo_tiny", *lacking)} == {"missing"}
    # What is wrong everywhere. Mutation: `missing` for a file that is there and cannot be read.
    assert {finding.level for finding in found("recipe=smollm2_sums", "model.gguf.file=other.gguf")} == {"error"}


OWN = {
    "my_parts": """
        from engine.workers.base import Annotator
        class Judge(Annotator):
            def annotate(self, rollout): ...
        class Backend:
            def mesh(self): ...
            extend = stream = wants = receive = load_adapter = load = reset_optimizer = score = values = optimizer_step = mesh
            full_weights = parameters = adapter_weights = without_adapter = state = load_state = mesh
        def function(response, *arguments): ...
    """,
    "my_broken": "1 / 0",
}
KEYS = {
    "stages.rl.algorithm.advantage.estimator": "function",
    "stages.rl.algorithm.loss.name": "function",
    "stages.rl.reward.default": "function",
    "stages.rl.reward.by_data_source.chain_sum": "function",
    "evaluation_reward.default": "function",
    "evaluation_reward.by_data_source.chain_sum": "function",
    "annotators.judge.worker": "Judge",
    "training.backend": "Backend",
    "rollout.backend": "Backend",
}


@pytest.fixture
def own(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(root)
    for name, text in OWN.items():
        (root / f"{name}.py").write_text(textwrap.dedent(text))
    yield
    for name in OWN:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("key", KEYS)
def test_a_module_or_attribute_of_ones_own_that_is_misspelt_names_the_key(own: None, key: str) -> None:
    """Mutation: take the key out of `_names`: the run would fail after minutes of model, data and workers."""
    attribute = KEYS[key]
    assert found("recipe=grpo_tiny", f"{key}=my_parts:{attribute}") == []
    for place, text in [
        (f"my_prats:{attribute}", "No module named 'my_prats'"),
        (f"my_parts:{attribute}s", f"did you mean {attribute}"),
        (f"my_broken:{attribute}", "its module raises ZeroDivisionError: division by zero"),
    ]:
        (finding,) = found("recipe=grpo_tiny", f"{key}={place}")
        assert finding.key == key
        assert place in finding.text
        assert text in finding.text


def test_a_class_that_lacks_a_method_names_the_key(own: None) -> None:
    for key in ("annotators.judge.worker", "training.backend", "rollout.backend"):
        (finding,) = found("recipe=grpo_tiny", f"{key}=my_parts:function")
        assert finding.key == key
        assert "has no method" in finding.text


def test_everything_of_ones_own_is_found_together(own: None) -> None:
    """Mutation: let the first error through."""
    assert keys(found("recipe=grpo_tiny", *(f"{key}=nowhere:thing" for key in KEYS))) == [
        "training.backend",
        "rollout.backend",
        "annotators.judge.worker",
        "stages.rl.algorithm.advantage.estimator",
        "stages.rl.algorithm.loss.name",
        "evaluation_reward.default",
        "evaluation_reward.by_data_source.chain_sum",
        "stages.rl.reward.default",
        "stages.rl.reward.by_data_source.chain_sum",
    ]


def test_a_filter_that_brings_back_what_was_left_out_is_pointed_at() -> None:
    caps = "max_prompt_tokens: 40, max_response_tokens: 64"
    stages = [
        f"stages.rate={{kind: difficulty, {caps}}}",
        f"stages.more={{kind: rl, prompts: rate, steps: 2, prompts_per_step: 32, {caps}, training: {{optimizer: {{learning_rate: 1e-4}}}}}}",
    ]
    brought_back = found("recipe=grpo_tiny", *stages, "stages.easy={kind: drop_easy, scores_of: [more]}", level="warning")
    assert keys(brought_back) == ["stages.easy.prompts"]
    assert "set it to rate" in brought_back[0].text
    assert found("recipe=grpo_tiny", *stages, "stages.easy={kind: drop_easy, scores_of: [more], prompts: rate}", level="warning") == []


SEARCH = "stages.search={kind: temperature_search, grid: {low: 0.9, high: 1.4, step: 0.1}, max_prompt_tokens: 40, max_response_tokens: 16}"


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["stages.rl.sampling.temperature=0.6"], False),
        (["stages.rl.sampling.temperature=0.5"], True),
        # The search may pick what its grid begins with. Mutation: compare with sampling.temperature, which stays 1.
        (
            [
                SEARCH,
                "stages.later={kind: rl, temperature_from: search, steps: 1, prompts_per_step: 2, max_prompt_tokens: 40, max_response_tokens: 16, "
                "training: {optimizer: {learning_rate: 1e-4}}}",
                "evaluation.sampling.temperature=0.95",
            ],
            True,
        ),
    ],
)
def test_an_evaluation_hotter_than_the_training_is_pointed_at(overrides: list[str], warned: bool) -> None:
    warnings = [finding for finding in found("recipe=grpo_tiny", *overrides, level="warning") if finding.key == "evaluation.sampling.temperature"]
    assert len(warnings) == warned


def test_caps_above_the_context_of_a_local_model_are_found(root: Path) -> None:
    (root / "mine").mkdir()
    (root / "mine" / "config.json").write_text('{"max_position_embeddings": 100}')
    caps = ["stages.rl.max_prompt_tokens=40", "stages.rl.max_response_tokens=61", "evaluation.max_response_tokens=60"]
    recipe = ["recipe=grpo_tiny", "~stages.sft", "~model.architecture"]
    settings = [*recipe, "model.path=mine", *caps]
    (finding,) = [finding for finding in found(*settings) if "context" in finding.text]
    assert finding.key == "stages.rl.max_response_tokens"
    assert "max_position_embeddings of" in finding.text
    # Mutation: a hub name is looked at as if it were a directory here.
    assert not [finding for finding in found(*recipe, "model.path=some/where", *caps) if "context" in finding.text]
    extended = "stages.rl.length_extension={factor: 1.5, attention_factor: 1.0}"
    assert not [finding for finding in found(*settings, extended) if "context" in finding.text]

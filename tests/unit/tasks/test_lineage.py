"""From what a run is made, and that what it loads is held against it."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from tasks import checkout, differences, record, workspace
from tasks.config import RecipeConfig
from tasks.data import prepare
from tasks.engines import Weights
from tasks.lineage import PATCH, ChangedInputError, Lineage, hold_inputs, hold_modules, resolve

CONFIG = {
    "name": "tiny",
    "description": "two steps",
    "seed": 3,
    "data": {"chain_sum": {}},
    "model": {"architecture": {}},
    "stages": {"sft": {"kind": "sft", "steps": 2, "training": {"optimizer": {"learning_rate": 1e-3}}}},
}
PROMPT = '{"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}, "data_source": "sums"}\n'


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one commit."""
    directory = tmp_path / "checkout"
    (directory / "requirements").mkdir(parents=True)
    for kind in ("cpu", "gpu"):
        (directory / "requirements" / f"{kind}.lock").write_text("torch")
    (directory / "engine.py").write_text("x = 1\n")
    (directory / "table.bin").write_bytes(bytes(range(256)))
    (directory / ".gitignore").write_text("ignored/\n")
    git(directory, "init", "-q")
    git(directory, "add", ".")
    git(directory, "commit", "-q", "-m", "first")
    monkeypatch.setattr(workspace, "checkout", lambda: directory)
    return directory


def git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def tiny(**more: object) -> RecipeConfig:
    return RecipeConfig.model_validate(CONFIG | more)


def test_lineage_names_everything(root: Path, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "train.jsonl").write_text(PROMPT)
    files = {"train_file": "train.jsonl", "sft_file": "train.jsonl", "checks": {"evaluation_files": ["train.jsonl"]}}
    (root / "my_metric.py").write_text("def score(): ...\n")
    monkeypatch.syspath_prepend(root)
    found = resolve(tiny(data=files, evaluation_reward={"default": "my_metric:score"}), root / "run")
    assert found.commit == git(code, "rev-parse", "HEAD").strip()
    assert (found.uncommitted, found.patch_digest, found.patch_left_out) == (False, None, [])
    assert found.configuration["stages"]["sft"]["steps"] == 2
    assert (found.configuration_digest, found.seed) == (tiny(data=files, evaluation_reward={"default": "my_metric:score"}).digest(), 3)
    assert set(found.inputs) == {"data.train_file", "data.sft_file", "data.checks.evaluation_files.0"}
    assert found.inputs["data.train_file"].sha256 == hashlib.sha256(PROMPT.encode()).hexdigest()
    assert found.own_modules == {"my_metric": hashlib.sha256(b"def score(): ...\n").hexdigest()}
    assert found.lock_digest == hashlib.sha256(b"torch").hexdigest()
    assert found.packages["pydantic"].count(".") == 2
    assert found.hardware["cores"] >= 1
    # What a run brings up to date itself. Mutation: ask for the whole status; after one run every other would be of uncommitted code.
    (code / "results" / "tiny").mkdir(parents=True)
    for file in ("dvc.lock", "results/tiny/metrics.json"):
        (code / file).write_text("{}")
    again = resolve(tiny(), root / "run")
    assert (again.uncommitted, again.patch_digest) == (False, None)
    assert not (root / "run" / PATCH).exists()


def test_the_kept_patch_gives_back_the_code_that_ran(root: Path, code: Path, tmp_path: Path) -> None:
    """Mutations: `git diff HEAD` alone has no new files; without --binary the table is lost; stripped, the last line is."""
    (code / "engine.py").write_text("x = 2\nlast line without end  ")
    (code / "table.bin").write_bytes(bytes(reversed(range(256))))
    (code / "new file.py").write_text("y = 1\n")
    (code / "ignored").mkdir()
    (code / "ignored" / "large").write_text("not code")
    git(code, "config", "color.ui", "always")
    git(code, "config", "diff.noprefix", "true")
    before = git(code, "status", "--porcelain")
    found = resolve(tiny(), root / "run")
    assert git(code, "status", "--porcelain") == before, "the person's own index was touched"
    assert found.uncommitted is True
    assert found.patch_digest == hashlib.sha256((root / "run" / PATCH).read_bytes()).hexdigest()

    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(code), str(clone)], check=True)
    git(clone, "checkout", "-q", found.commit or "")
    git(clone, "apply", str(root / "run" / PATCH))
    for name in ("engine.py", "table.bin", "new file.py"):
        assert (clone / name).read_bytes() == (code / name).read_bytes()
    assert not (clone / "ignored").exists()


def test_a_patch_has_its_bounds_and_says_what_is_not_in_it(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation: cut the text at the bound; what is kept can then not be applied.
    monkeypatch.setattr(checkout, "PATCH_BYTES", 2000)
    (code / "engine.py").write_text("x = 1\n" * 1000)
    (code / "huge.bin").write_bytes(bytes(3000))
    (code / "small.py").write_text("z = 1\n")
    found = checkout.patch()
    assert found is not None
    assert sorted(found.left_out) == ["engine.py", "huge.bin"]
    assert b"small.py" in found.text
    assert len(found.text) <= 2000


def test_without_git_nothing_is_known_and_nothing_fails(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found = resolve(tiny(), root / "run")
    assert (found.commit, found.uncommitted, found.patch_digest) == (None, None, None)


def test_weights_that_were_changed_are_not_loaded(tmp_path: Path) -> None:
    # Mutation: `Weights.unchanged` hashes nothing.
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    weights = Weights.of(tmp_path)
    assert weights.unchanged() == tmp_path
    (tmp_path / "model.safetensors").write_bytes(b"weighty")
    with pytest.raises(ChangedInputError, match=rf"model {tmp_path} is not what the run's lineage says: .*put it back, or start the run anew"):
        weights.unchanged()


def test_a_split_that_was_changed_is_not_loaded(root: Path) -> None:
    """Mutation: `PreparedData.unchanged` returns the path."""
    ready = prepare(tiny().data, 3, root / "data" / "tiny", 100, lambda messages: 3)
    assert ready.unchanged("train") == ready.path("train")
    ready.path("train").write_bytes(ready.path("test").read_bytes())
    with pytest.raises(ChangedInputError, match=r"split train, .*train\.parquet"):
        ready.unchanged("train")
    ready.path("train").unlink()
    with pytest.raises(ChangedInputError, match="is nothing"):
        ready.unchanged("train")


def test_an_input_or_a_module_that_was_changed_is_named(root: Path) -> None:
    (root / "train.jsonl").write_text(PROMPT)
    lineage = resolve(tiny(data={"train_file": "train.jsonl", "sft_file": "train.jsonl"}))
    hold_inputs(lineage, {"data.train_file": lineage.inputs["data.train_file"].sha256})
    with pytest.raises(ChangedInputError, match=r"data\.train_file=train\.jsonl is not what"):
        hold_inputs(lineage, {"data.train_file": "0" * 64})
    with pytest.raises(ChangedInputError, match="module my_reward is not"):
        hold_modules(lineage.model_copy(update={"own_modules": {"my_reward": "1" * 64}}), {"my_reward": "2" * 64})


def test_the_lineage_lies_beside_the_record_and_is_read_with_it(root: Path) -> None:
    # Mutation: dump the lineage into record.json too; the two could then differ.
    found = record.RunRecord(run="tiny-20260101-000000", recipe="tiny", seed=3, lineage=resolve(tiny()))
    record.write(found)
    assert "lineage" not in record.record_file(found.run).read_text()
    assert Lineage.model_validate_json(record.lineage_file(found.run).read_text()) == found.lineage
    found.lineage.parents = {"sft": "tiny-20251231-000000"}
    record.write(found)
    assert record.load(found.run).lineage == found.lineage


def test_differences_are_found_where_they_are_and_nowhere_else(root: Path, code: Path) -> None:
    """Mutations: any part compared with itself."""
    then = resolve(tiny())
    assert not any(differences.between(then, then).parts().values())
    (code / "engine.py").write_text("x = 2\n")
    git(code, "commit", "-q", "-a", "-m", "second")
    (code / "engine.py").write_text("x = 3\n")
    now = resolve(tiny(seed=4))
    now.dataset_digests, now.packages = {"train": "1" * 64}, now.packages | {"pydantic": "1.0"}
    now.hardware = now.hardware | {"cores": 99}
    found = differences.between(then, now)
    assert [title.partition(" ")[2] for title in found.commits] == ["second"]
    assert [title.partition(" ")[2] for title in differences.between(now, then).commits_gone] == ["second"]
    assert "engine.py" in found.files
    assert [what for what, _, _ in found.code] == ["commit", "uncommitted difference"]
    assert found.configuration == [("seed", "3", "4")]
    # The run before ended before it had data: nothing is known of them.
    assert found.data == []
    then.dataset_digests = {"train": "2" * 64}
    assert differences.between(then, now).data == [("split train", "2" * 64, "1" * 64)]
    assert found.packages == [("pydantic", then.packages["pydantic"], "1.0")]
    assert [(what, new) for what, _, new in found.hardware] == [("cores", "99")]

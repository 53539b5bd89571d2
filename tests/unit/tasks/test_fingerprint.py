"""Which settings change the output of which stage."""

from pathlib import Path
from typing import Any

import pytest

from tasks import fingerprint, workspace
from tasks.compose import compose
from tasks.fingerprint import of_evaluation, of_stage

SMALL = ["recipe=grpo_tiny"]
INPUTS = {"train": "0" * 64}


def stage(name: str, *overrides: str, weights: str = "w", inputs: Any = INPUTS) -> dict[str, Any]:
    return of_stage(compose([*SMALL, *overrides]), name, weights, inputs)


def evaluation(*overrides: str, weights: str = "w", prompts: str = "t") -> dict[str, Any]:
    return of_evaluation(compose([*SMALL, *overrides]), weights, prompts)


# Mutations: fingerprint the whole recipe; leave the rollout, the seed or the ranks out.
@pytest.mark.parametrize(
    ("override", "sft", "rl", "evaluated"),
    [
        ("stages.rl.steps=44", False, True, False),
        ("stages.sft.training.optimizer.learning_rate=1e-3", True, False, False),
        ("stages.rl.sampling.temperature=1.1", False, True, False),
        ("evaluation.samples_per_prompt=4", False, False, True),
        ("evaluation_reward.default=exact_match", False, False, True),
        ("seed=1", True, True, True),
        ("rollout.max_concurrent_samples=7", True, True, True),
        ("resources=one_cpu", True, True, True),
        ("training.gradient_checkpointing=true", True, True, True),
        ("model.dtype=bfloat16", True, True, True),
        # What changes no number: how long to wait, what is recorded, words, intervals, and the context that another stage asks for.
        ("resources.call_deadline_seconds=60", False, False, False),
        ("tracking.samples_per_table=3", False, False, False),
        ("minimum_free_disk_gigabytes=0", False, False, False),
        ("description=other", False, False, False),
        ("evaluation.bootstrap_resamples=10", False, False, False),
        ("evaluation.confidence=0.9", False, False, False),
        ("stages.rl.max_response_tokens=100", False, True, False),
        # Who sits where moves no bit of a result (tests/engine/test_placements.py).
        ("resources={ranks: 2, pools: {judge: {ranks: 1}}, roles: {reward: judge}}", False, False, False),
    ],
)
def test_a_setting_changes_what_depends_on_it_and_nothing_else(override: str, sft: bool, rl: bool, evaluated: bool) -> None:
    changed = (stage("sft", override) != stage("sft"), stage("rl", override) != stage("rl"), evaluation(override) != evaluation())
    assert changed == (sft, rl, evaluated)


def test_what_comes_in_counts() -> None:
    assert stage("rl", weights="other") != stage("rl")
    assert stage("rl", inputs={"train": "1" * 64}) != stage("rl")
    assert stage("rl", inputs={"prompts/difficulty": "0" * 64}) != stage("rl")
    assert evaluation(weights="other") != evaluation()
    assert evaluation(prompts="other") != evaluation()


def test_a_filter_without_an_engine_depends_on_its_files_alone() -> None:
    easy = ["stages.easy={kind: drop_easy, scores_of: [rl]}"]
    assert stage("easy", *easy) == stage("easy", *easy, "seed=1", weights="other")
    assert stage("easy", *easy) != stage("easy", *easy, "stages.easy.threshold=0.8")
    assert stage("easy", *easy) != stage("easy", *easy, inputs={"train": "1" * 64})


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with little in it."""
    for file in ("engine/a.py", "engine/deep/b.py", "engine/notes.md", "tasks/drop_easy.py", "tasks/show.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    monkeypatch.setattr(workspace, "checkout", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "counts"),
    [("engine/a.py", True), ("engine/deep/b.py", True), ("tasks/drop_easy.py", True), ("engine/notes.md", False), ("tasks/show.py", False)],
)
def test_the_code_that_runs_counts_and_other_files_do_not(checkout: Path, file: str, counts: bool) -> None:
    places = ("engine", "tasks/drop_easy.py")
    before = fingerprint.code.__wrapped__(places)
    (checkout / file).write_text("changed")
    assert (fingerprint.code.__wrapped__(places) != before) is counts


def test_the_source_of_a_function_of_ones_own_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_own_reward.py").write_text("def score(response, ground_truth):\n    return 1.0\n")
    override = "stages.rl.reward.default=my_own_reward:score"
    before = stage("rl", override)
    assert set(before["own_modules"]) == {"my_own_reward"}
    assert stage("sft", override) == stage("sft")
    (tmp_path / "my_own_reward.py").write_text("def score(response, ground_truth):\n    return 0.0\n")
    assert stage("rl", override) != before

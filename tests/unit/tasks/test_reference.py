"""References: from runs to a file, and who may be compared with it."""

import math
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import as_json, synthetic_run

from tasks import record, reference, workspace
from tasks.compose import compose
from tasks.config import RecipeConfig
from tasks.curves import Series
from tasks.problems import ConfigurationError
from tasks.reference import MetricReference

SETTINGS = ["recipe=grpo_tiny", "name=small", "stages.sft.steps=30", "stages.rl.steps=24"]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    return tmp_path


COMPOSED = compose(SETTINGS)


def config(seed: int = 0, *more: str) -> RecipeConfig:
    return (compose([*SETTINGS, *more]) if more else COMPOSED).model_copy(update={"seed": seed})


def made(seeds: int = 5) -> reference.Reference:
    runs = [synthetic_run(config(seed), f"small-20261130-0000{seed:02}", commit="c" * 40) for seed in range(1, seeds + 1)]
    return reference.build(config(), "grpo_tiny", SETTINGS[1:], runs)


def test_a_reference_holds_mean_and_spread_of_its_runs() -> None:
    """Two runs, 1 and 3: mean 2, spread sqrt(2) with n - 1. Mutation: divide by n."""
    found = MetricReference.of([Series(windows=[1.0, math.nan], noise=0.0), Series(windows=[3.0, 5.0], noise=0.0)])
    assert (found.mean, found.n) == ([2.0, 5.0], [2, 1])
    assert found.spread[0] == pytest.approx(math.sqrt(2), rel=1e-5)
    assert math.isnan(found.spread[1])


def test_what_is_written_is_loaded_and_is_json(root: Path) -> None:
    written = made()
    path = reference.write(written)
    assert path == root / "conf" / "reference" / "small.json"
    stored = as_json(path.read_text())
    assert stored["seeds"] == [1, 2, 3, 4, 5]
    assert stored["configuration_hash"] == reference.configuration_hash(config(seed=77))
    assert stored["seconds"] == 600
    assert set(stored["stages"]) == {"base", "sft", "rl"}
    assert len(stored["stages"]["rl"]["metrics"]["reward/mean"]["mean"]) == 24
    assert "timing/generate_seconds" not in stored["stages"]["rl"]["metrics"]
    loaded = reference.load("small")
    assert reference.digest(loaded) == reference.digest(written)
    np.testing.assert_array_equal(loaded.series()["rl"]["reward/mean"][0].windows, written.series()["rl"]["reward/mean"][0].windows)


def test_a_reference_of_another_configuration_is_refused_with_both_hashes() -> None:
    """Mutation: compare digests with the seed in them (the second line), or not at all."""
    known, changed = made(), config(1, "stages.rl.sampling.temperature=0.9")
    reference.check(known, config(seed=5))
    with pytest.raises(ConfigurationError) as refused:
        reference.check(known, changed)
    text = str(refused.value)
    assert known.configuration_hash[:16] in text
    assert reference.configuration_hash(changed)[:16] in text
    assert "almanac reference make grpo_tiny name=small stages.sft.steps=30" in text


def test_too_few_seeds_and_unknown_names_and_old_files_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A checkout without references.
    monkeypatch.setattr(workspace, "conf_directory", lambda: root / "nothing")
    with pytest.raises(ValueError, match="4 seeds are too few"):
        made(seeds=4)
    with pytest.raises(ValueError, match="there is none yet"):
        reference.load("small")
    path = reference.file("small")
    path.parent.mkdir(parents=True)
    path.write_text('{"name": "small"}')
    with pytest.raises(ValueError, match=r"small\.json: not a reference this version can read"):
        reference.load("small")
    with pytest.raises(ValueError, match=r"did you mean small"):
        reference.load("smal")


def test_a_run_is_used_again_where_nothing_but_the_time_differs() -> None:
    """Mutation: leave out any of the three conditions."""
    synthetic_run(config(1), "small-20261130-000001", commit="a")
    synthetic_run(config(2), "small-20261130-000002", commit="a", status="failed")
    known = record.loadable()
    assert reference.reusable(known, config(1), "a") == known["small-20261130-000001"]
    assert reference.reusable(known, config(1), "b") is None
    assert reference.reusable(known, config(2), "a") is None
    assert reference.reusable(known, config(1, "stages.rl.steps=25"), "a") is None

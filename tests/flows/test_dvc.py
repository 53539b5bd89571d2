"""DVC and a run agree: what one has made the other takes, and when a value is changed either makes what depends on it and nothing else."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from small_recipe import SMALL

from tasks.record import RunRecord

CHECKOUT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
RECIPE = [
    *(setting for setting in SMALL if not setting.startswith(("resources=", "stages.sft.steps="))),
    "resources=one_cpu",
    "rollout=transformers",
    "stages.sft.steps=40",
    # Learnt from what SFT has left, whatever that is: nothing is asked of the numbers here.
    "stages.easy={kind: drop_easy, scores_of: [rl], threshold: 2.0}",
]
# The story is told once, within the first test.
pytestmark = pytest.mark.timeout(2400)
UNITS = ["prepare", "validate", "evaluate-base", "sft", "evaluate-sft", "rl", "evaluate-rl", "easy", "report"]
SHORTER, LATEST = "stages.rl.steps=1", "stages.easy.estimator=latest"


@dataclass
class Project:
    """A checkout of its own, under git and DVC, that has not run anything."""

    root: Path
    states: dict[str, str] = field(default_factory=dict)
    """`dvc status` after each part of the story."""
    ran: dict[str, list[str]] = field(default_factory=dict)
    """The DVC stages that a `dvc` command has run, by part."""
    records: dict[str, RunRecord] = field(default_factory=dict)
    """Of the runs, by part."""

    def __call__(self, *command: str | Path, timeout: float = 1700) -> str:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "ALMANAC_", "RAY_", "DVC_"))}
        environment = inherited | {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            # The copy's code, not that which is installed.
            "PYTHONPATH": str(self.root),
            "DVC_NO_ANALYTICS": "1",
            "DVC_GLOBAL_CONFIG_DIR": str(self.root.parent / "dvc-global"),
            "DVC_SITE_CACHE_DIR": str(self.root.parent / "dvc-site"),
        }
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def almanac(self, *arguments: str) -> str:
        return self(sys.executable, "-m", "flows.cli", *arguments)

    def dvc(self, part: str, *arguments: str) -> str:
        said = self(BIN / "dvc", *arguments)
        self.ran[part] = re.findall(r"Running stage '(.+)'", said)
        self.states[part] = self(BIN / "dvc", "status")
        return said

    def run(self, part: str, *overrides: str) -> None:
        self.almanac("run", *RECIPE, *overrides)
        self.records[part] = RunRecord.model_validate_json(self.almanac("show", "latest", "--json"))
        self.states[part] = self(BIN / "dvc", "status")

    def engines(self, part: str) -> bool:
        """Whether the run has started one."""
        return any((self.root / ".work/runs" / self.records[part].run / "workers").glob("*"))

    def reused(self, part: str) -> list[str]:
        return [stage.name for stage in self.records[part].stages if stage.reused_from is not None]

    def tracked(self) -> dict[str, bytes]:
        """What git and DVC hold of the results."""
        files = [self.root / "dvc.lock", *sorted((self.root / "results").rglob("*"))]
        return {str(path.relative_to(self.root)): path.read_bytes() for path in files if path.is_file()}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = Project(tmp_path_factory.mktemp("dvc") / "project")
    for folder in ("conf", "engine", "flows", "requirements", "tasks"):
        shutil.copytree(CHECKOUT / folder, made.root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (".gitignore", ".dvcignore", "pyproject.toml"):
        shutil.copy(CHECKOUT / file, made.root)
    made(*GIT, "init", "--quiet")
    made(BIN / "dvc", "init", "--quiet")
    shutil.copy(CHECKOUT / ".dvc/config", made.root / ".dvc/config")
    made(*GIT, "add", ".")
    made(*GIT, "commit", "--quiet", "--message", "nothing has run")
    return made


@dataclass
class Story:
    """In this order, in one project."""

    project: Project
    first: dict[str, bytes] = field(default_factory=dict)
    """What lay there after the first run, before DVC did anything."""
    committed: dict[str, bytes] = field(default_factory=dict)
    """After the first `dvc repro`."""


@pytest.fixture(scope="module")
def story(project: Project) -> Story:
    told = Story(project)
    project.almanac("dvc", *RECIPE)
    project.run("run")
    told.first = project.tracked()
    project.dvc("repro", "repro")
    told.committed = project.tracked()
    project(*GIT, "add", ".")
    project(*GIT, "commit", "--quiet", "--message", "first")
    # A training stage is changed: DVC makes it, a run takes it.
    project.almanac("dvc", *RECIPE, SHORTER)
    project.dvc("repro shorter", "repro")
    project.run("run shorter", SHORTER)
    # A filter is changed, where only what was published lies ready: a run makes it, DVC takes it.
    shutil.rmtree(project.root / ".work/stages")
    project.almanac("dvc", *RECIPE, SHORTER, LATEST)
    project.run("run latest", SHORTER, LATEST)
    project.dvc("repro latest", "repro")
    return told


def test_after_a_run_dvc_has_nothing_to_do(story: Story) -> None:
    """Mutations: no `dvc commit` after a run; a dependency of dvc.yaml that a run leaves out, or volatile content in what is published."""
    assert story.project.reused("run") == []
    assert "up to date" in story.project.states["run"]
    assert story.project.ran["repro"] == []
    assert story.committed == story.first
    # Weights and metrics of every stage lie there, and dvc.lock names them all.
    lock = story.first["dvc.lock"].decode()
    assert all(f"\n  {unit}:\n" in lock for unit in UNITS)
    for unit in UNITS[1:]:
        assert f"results/grpo_tiny/{unit}/metrics.json" in story.first
    assert "results/grpo_tiny/rl/output/model/model.safetensors" in story.first


def test_after_dvc_a_run_has_nothing_to_do(story: Story) -> None:
    """Mutation: `python -m tasks.dvc_stage` leaves its output elsewhere, or with other settings."""
    project = story.project
    assert project.reused("run shorter") == ["sft", "rl", "easy"]
    assert not project.engines("run shorter")
    assert "up to date" in project.states["run shorter"]
    # Made by DVC, in a run of its own.
    by = project.records["run shorter"].stage("rl").reused_from
    assert by != project.records["run"].run
    assert project.records["run shorter"].stage("sft").reused_from == project.records["run"].run


def test_a_changed_value_makes_dvc_run_what_depends_on_it(story: Story) -> None:
    """Mutation: the whole of params.yaml as a dependency, or `stages` without their names."""
    assert sorted(story.project.ran["repro shorter"]) == sorted(["rl", "evaluate-rl", "easy", "report"])
    assert "up to date" in story.project.states["repro shorter"]


def test_a_changed_value_makes_a_run_make_what_depends_on_it(story: Story) -> None:
    """Here with nothing in `.work/stages`, as after `dvc pull`. Mutation: look for outputs there alone; the engine would start."""
    project = story.project
    assert project.reused("run latest") == ["sft", "rl"]
    assert not project.engines("run latest")
    assert "up to date" in project.states["run latest"]
    assert project.ran["repro latest"] == []


def test_weights_are_evaluated_by_themselves(story: Story) -> None:
    said = story.project(sys.executable, "-m", "tasks.stage", *RECIPE, SHORTER, LATEST, "evaluate=rl")
    # As it lies ready: the accuracy is that of the run.
    after = story.project.records["run latest"].stage("rl").accuracy_after
    assert after is not None
    assert said.startswith(f"avg@2 {100 * after:.1f} % [")


def test_experiments_metrics_parameters_and_plots_are_dvcs(story: Story) -> None:
    project = story.project
    project.dvc("experiment", "exp", "run", "--name", "lower", "--set-param", "stages.easy.threshold=1e-1")
    # The setting reaches the run. Mutation: stages read conf/ in place of params.yaml.
    assert project.ran["experiment"] == ["easy"]
    made_from = json.loads((project.root / "results/grpo_tiny/easy/output/output.json").read_text())["made_from"]
    assert made_from["settings"]["threshold"] == 0.1
    changed = json.loads(project(BIN / "dvc", "params", "diff", "--json"))["params.yaml"]
    assert changed["stages.rl.steps"] == {"old": 2, "new": 1, "diff": -1}
    metrics = json.loads(project(BIN / "dvc", "metrics", "diff", "--json"))
    assert metrics["results/grpo_tiny/rl/metrics.json"]["steps"] == {"old": 2, "new": 1, "diff": -1}
    assert "gain" in project(BIN / "dvc", "metrics", "show")
    plots = json.loads(project(BIN / "dvc", "plots", "diff", "--json"))["data"]
    assert {"Reward", "SFT loss"} <= set(plots)
    assert any(name.endswith("report/output/plots/accuracy.png") for name in plots)
    assert "lower" in project(BIN / "dvc", "exp", "show", "--csv")


def test_everything_is_pushed_to_the_folder_beside(story: Story) -> None:
    project = story.project
    project(BIN / "dvc", "push")
    assert "in sync" in project(BIN / "dvc", "status", "--cloud")
    assert any((project.root.parent / "almanac.dvc").rglob("*.dir"))

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from flows import cli, commands
from tasks import record, workspace
from tasks.lineage import Lineage
from tasks.problems import ConfigurationError, Problem
from tasks.record import RunRecord, StageRecord
from tasks.run_lock import RunInProgressError, only_run

HOLDER = """
import sys, time
from tasks.run_lock import only_run
with only_run("grpo_tiny-20261129-140312"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # The command sets variables of its own, which the next test must not see.
    with mock.patch.dict(os.environ):
        monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
        for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS", "ALMANAC_DEBUG"):
            monkeypatch.delenv(name, raising=False)
        yield tmp_path


@pytest.mark.parametrize("verb", [["run"], ["preflight", "--here"]], ids=" ".join)
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "recipe"),
        (["recipe=grpo_tny"], "did you mean grpo_tiny"),
        (["recipe=grpo_tiny", "stages.rl.stepz=3"], "did you mean stages.rl.steps"),
        (["recipe=grpo_tiny", "stages.rl.steps=many"], "stages.rl.steps"),
        (["recipe=grpo_tiny", "stages.rl.prompts_per_step=31"], "cannot be divided among resources.ranks=2"),
        (["recipe=grpo_tiny", "~stages.sft", "data=files", "data.train_file=nowhere.parquet"], "nowhere.parquet"),
        (["recipe=grpo_tiny", "resources.ranks=512", "stages.rl.prompts_per_step=512", "stages.sft.rows_per_step=512"], "CPU"),
        (["recipe=grpo_tiny", "minimum_free_disk_gigabytes=1e9"], "minimum_free_disk_gigabytes"),
    ],
)
def test_bad_input_ends_with_2_and_leaves_nothing(
    verb: list[str], overrides: list[str], said: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*verb, *overrides]) == cli.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err
    # Mutation: taking the lock or making the run's directory before the checks leaves .work behind.
    assert not (root / ".work").exists()
    assert not (root / "data").exists()


def test_a_run_until_a_stage_that_there_is_not_ends_before_anything_starts(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation: look for the stage when the flow has started."""
    assert cli.main(["run", "recipe=polaris_tiny", "--until", "stage_4"]) == cli.BAD_INPUT
    assert "stage_4 (did you mean stage_" in capsys.readouterr().err
    assert not (root / ".work").exists()


def test_all_problems_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "recipe=grpo_tiny", "stages.rl.stepz=3", "seed=-1"]) == cli.BAD_INPUT
    err = capsys.readouterr().err
    assert "stages.rl.stepz" in err
    assert "seed" in err


@pytest.mark.parametrize("argv", [[], ["sing"], ["show", "a", "b"], ["run", "--fast"], ["ui", "--port", "high"]])
def test_unknown_arguments_end_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2


def test_overrides_may_stand_before_and_after_options() -> None:
    arguments = cli.parse(["evaluate", "MODEL", "recipe=smollm2_sums", "--json", "evaluation.max_prompts=4", "~stages.sft"])
    assert arguments.json
    assert arguments.model == "MODEL"
    assert arguments.overrides == ["recipe=smollm2_sums", "evaluation.max_prompts=4", "~stages.sft"]


def test_dvcs_files_are_checked_against_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    files = [workspace.checkout() / name for name in ("params.yaml", "dvc.yaml")]
    before = [path.read_bytes() for path in files]
    assert cli.main(["dvc", "--check"]) == 0
    assert capsys.readouterr().out == ""
    # Mutation: 0 whatever differs; CI would not see it.
    assert cli.main(["dvc", f"recipe={commands.DEFAULT_RECIPE}", "seed=3", "--check"]) == cli.FAILED
    assert "params.yaml: seed is " in capsys.readouterr().out
    assert [path.read_bytes() for path in files] == before


def test_preflight_says_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["preflight", "recipe=grpo_tiny", "resources=one_cpu", "stages.rl.steps=7"]) == 0
    out = capsys.readouterr().out
    assert "rl (rl, 7 steps)" in out
    assert "1 rank, cpu" in out


def test_preflight_tells_what_is_wrong_from_what_this_machine_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation: refuse both without `--here`."""
    assert cli.main(["preflight", "recipe=grpo_tiny", "minimum_free_disk_gigabytes=1e9"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("grpo_tiny is right: ")
    assert "This machine lacks for it:\n  minimum_free_disk_gigabytes: 1e+09 GB are asked for" in out
    assert cli.main(["preflight", "recipe=smollm2_sums", "model.gguf.file=other.gguf"]) == cli.BAD_INPUT


@pytest.mark.parametrize("argv", [["list"], ["preflight", "recipe=grpo_tiny"], ["doctor"], ["dvc", "--check"]])
def test_light_commands_import_nothing_heavy(argv: list[str]) -> None:
    script = (
        "import sys; from flows.cli import main; code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'vllm', 'ray', 'mlflow', 'prefect'} & set(sys.modules)\n"
        "print(heavy, file=sys.stderr); sys.exit(99 if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_list_names_recipes_algorithms_and_rewards(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    for name in ("grpo_tiny", "smollm2_sums", "dr_grpo", "exact_match", "math_verify", "colocated"):
        assert name in out


def test_doctor_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere:10001")
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["services"]["ray"] == "ray://somewhere:10001"
    assert found["machine"]["dtype"] in ("float32", "bfloat16")
    assert found["versions"]["torch"]
    assert found["problems"] == []


def test_doctor_finds_what_cannot_be_written(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "mlruns").write_text("a file where a directory should be")
    assert cli.main(["doctor"]) == 1
    assert "mlruns" in capsys.readouterr().out


def test_show_latest_and_by_id(capsys: pytest.CaptureFixture[str]) -> None:
    stage = StageRecord(name="rl", kind="rl", steps_planned=3, steps=3, status="finished", accuracy_after=0.5)
    lineage = Lineage(configuration_digest="0" * 64, seed=0)
    found = RunRecord(run="grpo_tiny-20261129-140312", status="finished", recipe="grpo_tiny", seed=0, stages=[stage], lineage=lineage)
    record.write(found)
    assert cli.main(["show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["run"], shown["stages"][0]["accuracy_after"]) == (found.run, 0.5)
    assert cli.main(["show", found.run]) == 0
    assert found.run in capsys.readouterr().out
    assert cli.main(["show", "grpo_tiny-20261129-140313"]) == cli.BAD_INPUT
    assert found.run in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigurationError([Problem("seed", "is wrong")]), 2, "seed: is wrong"),
        (RunInProgressError("the run X is on"), 2, "the run X is on"),
        (OSError(errno.ENOSPC, "No space left on device", "/somewhere/events.jsonl"), 1, "No space left on device: '/somewhere/events.jsonl'"),
        (RuntimeError("worker rank 1 is gone"), 1, "RuntimeError: worker rank 1 is gone"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "ALMANAC_ROOT"),
        (KeyError("oops"), 1, "KeyError"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_become_a_message_and_an_exit_code(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: object) -> int:
        error.add_note("log: .work/runs/X/almanac.log")
        raise error

    monkeypatch.setattr(commands, "run", fail)
    assert cli.main(["run", "recipe=grpo_tiny"]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "log: .work/runs/X/almanac.log" in err
    assert "Traceback" not in err
    monkeypatch.setenv("ALMANAC_DEBUG", "1")
    assert cli.main(["run", "recipe=grpo_tiny"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_one_run_at_a_time_and_a_dead_one_is_no_obstacle(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert cli.main(["run", "recipe=grpo_tiny"]) == cli.BAD_INPUT
        err = capsys.readouterr().err
        # Mutation: acquiring with a lock file that is truncated on opening loses the name and the process.
        assert "grpo_tiny-20261129-140312" in err
        assert str(holder.pid) in err
        assert not (root / ".work" / "runs").exists()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert workspace.lock_file().exists()
    # Mutation: a lock that is a mere file would still be there.
    with only_run("grpo_tiny-20261129-150000"):
        assert "150000" in workspace.lock_file().read_text()

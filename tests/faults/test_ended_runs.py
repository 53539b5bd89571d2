"""A run that is killed, and one whose disk fills up, as the next person at the machine finds them."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from small_recipe import SMALL, Almanac
from waiting import wait_for


def training(almanac: Almanac) -> bool:
    """Whether the run has done a step."""
    return any("StepFinished" in log.read_text() for log in almanac.root.glob(".work/runs/*/events.jsonl"))


def holds_something(process: psutil.Process) -> bool:
    """Ray's workers and Prefect's server. Ray's agents take a minute to see that their cluster is gone, and hold nothing."""
    command = " ".join(process.cmdline())
    return "uvicorn" in command or ("ray::" in command and "Agent" not in command)


# Mutation: leave the process out of the record (status stays running), hold the lock by the file's existence, or let nobody stop Prefect's
# temporary server.
def test_a_killed_run_is_seen_as_killed_and_is_no_obstacle(tmp_path: Path) -> None:
    almanac = Almanac(tmp_path)
    run = almanac.start("run", *SMALL, "stages.sft.steps=100000")
    try:
        wait_for("a training step", lambda: training(almanac), 240)
        family = [child for child in psutil.Process(run.pid).children(recursive=True) if holds_something(child)]
    finally:
        run.kill()
        run.wait()
    assert family
    left = psutil.wait_procs(family, timeout=60)[1]
    assert not left, f"outlived their run: {[process.cmdline() for process in left]}"

    shown = json.loads(almanac("show", "latest", "--json").stdout)
    assert shown["status"] == "killed"
    assert shown["stages"][0]["steps"] < 100000
    # The lock is free: what stops the next run is its own bad input.
    again = almanac("run", *SMALL, "model.architecture.initializer_range=-1")
    assert (again.returncode, "initializer_range" in again.stderr) == (2, True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", disk], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


# Mutation: swallow OSError in the tracker or the export, or write the record without its reserve.
def test_a_full_disk_ends_the_run_with_its_reason_and_nothing_half_written(small_disk: Path) -> None:
    almanac = Almanac(small_disk)
    ran = almanac("run", *SMALL, "minimum_free_disk_gigabytes=0")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "space" in ran.stderr
    shown = json.loads(almanac("show", "latest", "--json").stdout)
    assert (shown["status"], "space" in shown["error"]) == ("failed", True)
    # Directories appear whole: a model without its configuration, or a data set without its manifest, would be half of one.
    for weights in small_disk.glob(".work/**/model.safetensors"):
        assert (weights.parent / "config.json").is_file()
    assert not [path for path in small_disk.glob(".work/**/.*") if path.is_dir()]

"""What the machine is found to have, on machines made up for the test."""

from pathlib import Path

import pytest

from engine import hardware


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    hardware._installed_gpus.cache_clear()
    yield
    hardware._installed_gpus.cache_clear()


def with_cpu(monkeypatch: pytest.MonkeyPatch, directory: Path, flags: str) -> None:
    file = directory / "cpuinfo"
    file.write_text(f"processor\t: 0\nmodel name\t: Some CPU: fast\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: other\n")
    monkeypatch.setattr(hardware, "_CPU_FACTS", file)


def with_nvidia_smi(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str) -> None:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(hardware.shutil, "which", lambda name: str(program))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx2 avx512f", False), ("avx512_bf16", True), ("fpu amx_bf16 x", True), ("not_avx512_bf16_either", False), ("", False)],
)
def test_bfloat16_instructions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, expected: bool) -> None:
    """Mutation: search the text for `avx512_bf16` instead of the set of flags, and the fourth case is true."""
    with_cpu(monkeypatch, tmp_path, flags)
    assert hardware.cpu_has_bfloat16() is expected
    assert hardware.resolve_dtype("cpu", "auto") == ("bfloat16" if expected else "float32")


def test_dtype_that_is_asked_for_stays_and_gpus_take_bfloat16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_cpu(monkeypatch, tmp_path, "avx2")
    assert hardware.resolve_dtype("cpu", "bfloat16") == "bfloat16"
    assert hardware.resolve_dtype("cuda", "float32") == "float32"
    assert hardware.resolve_dtype("cuda", "auto") == "bfloat16"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["A", "B"]), ("", []), ("-1", []), ("1", ["B"]), ("1,0", ["B", "A"]), ("0,7,1", ["A"]), ("GPU-1234", ["A"])],
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, expected: list[str]) -> None:
    with_nvidia_smi(monkeypatch, tmp_path, "echo A\necho B")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.gpus() == expected


def test_a_driver_that_fails_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_nvidia_smi(monkeypatch, tmp_path, "echo 'NVIDIA-SMI has failed'; exit 9")
    assert hardware.gpus() == []


@pytest.mark.parametrize(("version", "expected"), [("2.13.0+cpu", "cpu"), ("2.13.0", "cuda"), ("2.13.0+cu129", "cuda")])
def test_auto_device_needs_a_gpu_and_a_pytorch_that_uses_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, expected: str) -> None:
    with_nvidia_smi(monkeypatch, tmp_path, "echo A")
    monkeypatch.setattr(hardware.metadata, "version", lambda name: version)
    assert hardware.resolve_device("auto") == expected
    assert hardware.resolve_device("cpu") == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.resolve_device("auto") == "cpu"


def test_description_of_this_machine() -> None:
    facts = hardware.describe()
    assert facts["cores"] >= 1
    assert facts["memory_gigabytes"] > 0
    assert facts["device"] in ("cpu", "cuda")

"""What this machine has, found out without importing torch: cores, memory, GPUs, and the number type that suits them."""

import functools
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]

_CPU_FACTS = Path("/proc/cpuinfo")
_GPU_QUERY = ("--query-gpu=name", "--format=csv,noheader")


def cpu_flags() -> frozenset[str]:
    """Instruction-set extensions of the first core, as Linux names them; empty where it does not tell."""
    return frozenset(_cpu_fact("flags").split())


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 by itself. Where it does not, PyTorch emulates, a hundred times slower than float32."""
    return not cpu_flags().isdisjoint({"avx512_bf16", "amx_bf16"})


def gpus() -> list[str]:
    """Names of the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves to this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    installed = _installed_gpus()
    if visible is None:
        return list(installed)
    # CUDA stops reading at the first device that does not exist; "" and "-1" hide all.
    chosen = []
    for name in visible.split(","):
        if name.isdecimal() and int(name) < len(installed):
            chosen.append(installed[int(name)])
        elif name.startswith(("GPU-", "MIG-")) and installed:
            chosen.append(installed[0])
        else:
            break
    return chosen


def torch_has_cuda() -> bool:
    """Whether the installed PyTorch was built for CUDA, judged by its version: `2.13.0+cpu` was not."""
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def resolve_device(requested: Literal["auto", "cpu", "cuda"]) -> Device:
    """`auto` is cuda where there is both a GPU and a PyTorch that uses it. Ask in the driver: Ray hides GPUs from actors that hold none."""
    if requested != "auto":
        return requested
    return "cuda" if torch_has_cuda() and gpus() else "cpu"


def resolve_dtype(device: Device, requested: Literal["auto", "float32", "bfloat16"]) -> Dtype:
    """`auto` is bfloat16 on GPUs and on CPUs with bfloat16 instructions, else float32."""
    if requested != "auto":
        return requested
    return "bfloat16" if device == "cuda" or cpu_has_bfloat16() else "float32"


def cores() -> int:
    """Logical cores, as Ray counts them."""
    return os.cpu_count() or 1


def memory_gigabytes() -> float:
    """Memory of the machine, or of the container where that has less; in units of 1e9 bytes."""
    limits = [psutil.virtual_memory().total]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdecimal():
            limits.append(int(text))
    return min(limits) / 1e9


def describe() -> dict[str, Any]:
    """What `almanac doctor` shows and a run's lineage keeps."""
    device = resolve_device("auto")
    return {
        "platform": platform.platform(),
        "cpu": _cpu_fact("model name") or platform.machine(),
        "cores": cores(),
        "memory_gigabytes": round(memory_gigabytes(), 1),
        "cpu_has_bfloat16": cpu_has_bfloat16(),
        "gpus": gpus(),
        "device": device,
        "dtype": resolve_dtype(device, "auto"),
    }


def _cpu_fact(name: str) -> str:
    if not _CPU_FACTS.is_file():
        return ""
    for line in _CPU_FACTS.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


@functools.cache
def _installed_gpus() -> tuple[str, ...]:
    program = shutil.which("nvidia-smi")
    if program is not None:
        try:
            answer = subprocess.run([program, *_GPU_QUERY], capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            # A driver that does not answer is no driver to train with.
            return ()
        return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())
    # Containers often have the driver but not its tools.
    return tuple(directory.name for directory in sorted(Path("/proc/driver/nvidia/gpus").glob("*")))

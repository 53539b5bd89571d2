"""`almanac estimate`: memory and time of a recipe by phase, as tables for people and as JSON."""

from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table

from tasks.estimate import Estimate


def summary(found: Estimate) -> dict[str, Any]:
    """All numbers: bytes of one rank, seconds of one step, device-hours of a stage."""
    return {
        "device": found.device_name,
        "parameters": found.architecture.parameters,
        "memory": asdict(found.memory) | {"phases": found.memory.phases(), "device": found.device.memory_bytes},
        "stages": [asdict(cost) | {"step_seconds": cost.step_seconds, "device_hours": cost.device_hours()} for cost in found.costs],
        "device_hours": found.device_hours,
    }


def table(found: Estimate) -> Group:
    """What a rank holds in each phase, and what each stage takes."""
    memory = _table("memory of a rank", "GB")
    for phase, taken in found.memory.phases().items():
        memory.add_row(phase, f"{taken / 1e9:.1f}")
    costs = Table(box=None, padding=(0, 3, 0, 0))
    phases = list(dict.fromkeys(phase for cost in found.costs for phase in cost.seconds))
    for name in ("stage", "steps", *(f"{phase}, s" for phase in phases), "step, s", "device-hours"):
        costs.add_column(name, justify="left" if name == "stage" else "right")
    for cost in found.costs:
        seconds = [f"{cost.seconds[phase]:,.1f}" if phase in cost.seconds else "" for phase in phases]
        costs.add_row(cost.stage, str(cost.steps), *seconds, f"{cost.step_seconds:,.1f}", f"{sum(cost.device_hours().values()):,.1f}")
    fits = "fits" if found.fits else "does NOT fit"
    return Group(f"{found.architecture.parameters:,} parameters on {found.device_name}: {fits}", "", memory, "", costs, "", found.assumption)


def _table(*names: str) -> Table:
    made = Table(box=None, padding=(0, 3, 0, 0))
    for number, name in enumerate(names):
        made.add_column(name, justify="right" if number else "left")
    return made

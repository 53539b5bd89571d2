"""Memory and cost of a recipe together, on a device by name."""

from dataclasses import dataclass

from engine.hardware import resolve_device
from tasks.architecture import Architecture, architecture_of
from tasks.check import did_you_mean
from tasks.config import RecipeConfig
from tasks.cost import MEAN_SHARE, Cost, costs
from tasks.devices import DEVICES, Device
from tasks.memory import Memory, memory

USUAL = {"cuda": "h800", "cpu": "cpu"}
"""Device that an estimate is for where none is named."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a recipe needs."""

    device_name: str
    device: Device
    architecture: Architecture
    memory: Memory
    costs: list[Cost]
    mean_share: float

    @property
    def fits(self) -> bool:
        """Whether a rank's memory holds what every phase takes."""
        return self.memory.peak <= self.device.memory_bytes

    @property
    def device_hours(self) -> float:
        """Of all stages together."""
        return sum(sum(cost.device_hours().values()) for cost in self.costs)

    @property
    def assumption(self) -> str:
        """What nobody knows before a run."""
        return f"Responses are taken to be {self.mean_share:.0%} of their cap long on average; evaluations and filters are not counted."

    def line(self) -> str:
        """All of it in one line."""
        phases = ", ".join(f"{phase} {taken / 1e9:.1f}" for phase, taken in self.memory.phases().items())
        room = f"{'fits' if self.fits else 'does NOT fit'} into {self.device.memory_bytes / 1e9:.0f}"
        return f"on {self.device_name}: memory of a rank {phases} GB, {room}; about {self.device_hours:,.1f} device-hours (almanac estimate)"


def estimate(config: RecipeConfig, device: str | None = None, mean_share: float = MEAN_SHARE) -> Estimate:
    """Memory of a rank and cost of each stage, without loading anything.

    Raises:
        ValueError: there is no such device, or nothing is known of the model's architecture.
    """
    name = device or USUAL[resolve_device(config.resources.pool(config.resources.pool_of("actor")).device)]
    if name not in DEVICES:
        raise ValueError(f"--device {name}: unknown{did_you_mean(name, DEVICES)}; there are: {', '.join(DEVICES)}")
    if not 0 < mean_share <= 1:
        raise ValueError(f"--mean-share {mean_share:g}: a share of the cap on responses, above 0 and at most 1")
    architecture = architecture_of(config.model)
    if architecture is None:
        raise ValueError(f"model.path: nothing is known here of the architecture of {config.model.path}; name a directory that has its config.json")
    held = memory(config, architecture, DEVICES[name])
    return Estimate(name, DEVICES[name], architecture, held, costs(config, architecture, DEVICES[name], held, mean_share), mean_share)

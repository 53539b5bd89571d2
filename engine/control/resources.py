"""Reserves the devices of all ranks at once, or says within a deadline what is short."""

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from engine.config import ResourcesConfig


class ResourceError(ValueError):
    """Ray cannot give the devices that the configuration asks for."""


def reserve(config: ResourcesConfig, device: str) -> PlacementGroup:
    """A placement group of one bundle a rank, on as few nodes as possible.

    Raises `ResourceError` within `creation_deadline_seconds`, naming the resource that is short.
    """
    bundle = {"CPU": float(config.cpus_per_rank)} | ({"GPU": 1.0} if device == "cuda" else {})
    owned = ray.cluster_resources()
    for name, each in bundle.items():
        wanted, have = each * config.ranks, owned.get(name, 0.0)
        if wanted > have:
            raise ResourceError(f"resources.ranks={config.ranks} needs {wanted:g} {name}s, and Ray has {have:g}. Lower resources.ranks or add nodes.")
    # What others hold now, or held a moment ago, may still come free: only the deadline decides.
    group = placement_group([bundle] * config.ranks, strategy="PACK")
    ready, _ = ray.wait([group.ready()], timeout=config.creation_deadline_seconds)
    if not ready:
        remove_placement_group(group)
        free = ", ".join(f"{ray.available_resources().get(name, 0.0):g} of {owned[name]:g} {name}s" for name in bundle)
        raise ResourceError(
            f"Ray could not reserve resources.ranks={config.ranks} bundles of {bundle} within {config.creation_deadline_seconds:g} s. "
            f"Free are {free}; each bundle needs one node that has all of it. Lower resources.ranks, or stop what holds the rest."
        )
    return group

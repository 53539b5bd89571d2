"""This rank's share of tensors that are spread over ranks (DTensor), whatever the meshes they lie on."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part that lies on this rank, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def device_mesh(order: torch.Tensor, device_type: str, names: tuple[str, ...]) -> DeviceMesh:
    """Ranks in the order in which they are given, which FSDP2 follows: shard i belongs to the i-th rank of the last dimension. A collective.

    `DeviceMesh(device, mesh)` alone would sort the ranks of its groups. FSDP2 divides by rank in the group, a DTensor's offsets come from the
    place in the mesh, and with ranks out of order the two disagree (torch 2.13).
    """
    if torch.equal(order.flatten(), torch.arange(order.numel())):
        return init_device_mesh(device_type, tuple(order.shape), mesh_dim_names=names)
    groups = []
    for dimension in range(order.ndim):
        lines = order.movedim(dimension, -1).flatten(0, -2) if order.ndim > 1 else order.unsqueeze(0)
        made = {tuple(line): dist.new_group(line, sort_ranks=False) for line in lines.tolist()}
        groups.append(next(group for line, group in made.items() if dist.get_rank() in line))
    if order.ndim == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device_type, mesh=order, mesh_dim_names=names)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, on every rank. A collective over its mesh, one dimension after the other: the data dimension was cut last."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    for dimension in range(tensor.device_mesh.ndim):
        tensor = tensor.redistribute(placements=[Replicate()] * (dimension + 1) + list(tensor.placements[dimension + 1 :]))
    return tensor.to_local()


def take(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copies this rank's part of `value`, which every rank has whole, into `parameter`. No collective."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        value = local(distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None))
    local(parameter).copy_(value)


def clip_gradients(parameters: Iterable[torch.nn.Parameter], largest_norm: float) -> float:
    """Scales the gradients down to L2 norm `largest_norm` over all parameters of all ranks; returns the norm before. A collective.

    Parameters may lie on different meshes, which `torch.nn.utils.clip_grad_norm_` cannot add up. A norm that is not finite changes nothing.
    """
    alike: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            layout = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
            alike.setdefault(layout, []).append(local(gradient))
    total = 0.0
    for layout, gradients in alike.items():
        square = torch.nn.utils.get_total_norm(gradients).double().square()
        for dimension, placement in enumerate(layout[1] if layout else ()):
            if not isinstance(placement, Replicate):  # Ranks that hold copies would be counted more than once.
                dist.all_reduce(square, group=layout[0].get_group(dimension))
        total += float(square)
    norm = total**0.5
    if largest_norm < norm < float("inf"):
        for gradient in (gradient for gradients in alike.values() for gradient in gradients):
            gradient.mul_(largest_norm / (norm + 1e-6))
    return norm


def optimizer_state(optimizer: Optimizer) -> list[dict[str, torch.Tensor]]:
    """This rank's part of what the optimizer keeps for each parameter, in order, copied to the host; empty before the first step."""
    kept = ({key: to_host(value) for key, value in optimizer.state.get(parameter, {}).items()} for parameter in _parameters(optimizer))
    return list(kept)


def load_optimizer_state(optimizer: Optimizer, state: list[dict[str, torch.Tensor]]) -> None:
    """What `optimizer_state` gave, into a fresh optimizer over the same parameters."""
    for parameter, kept in zip(_parameters(optimizer), state, strict=True):
        for key, value in kept.items():
            if value.ndim == 0:  # a count of steps
                optimizer.state[parameter][key] = value.clone()
            else:
                optimizer.state[parameter][key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                local(optimizer.state[parameter][key]).copy_(value)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's part."""
    return local(tensor).to("cpu", copy=True)


def _parameters(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])

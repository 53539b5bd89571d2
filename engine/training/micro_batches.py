"""Cuts a rank's rows into forward passes of bounded size."""

import torch
import torch.distributed as dist

from engine.batch import Batch


def micro_batches(batch: Batch, max_tokens: int, *, padded: bool, group: dist.ProcessGroup | None) -> list[Batch]:
    """`batch` in parts of rows of similar length, each of at most `max_tokens` tokens, trimmed to its longest row.

    Padding counts where passes are `padded`, else only real tokens do. A single longer row is a part of its own.
    Sharded forwards are collectives, so every rank must make as many: the largest count in `group` (None: all ranks) decides, and a rank
    with fewer parts than that, or without any row, fills up with parts of one token and no response, which add nothing to a loss.
    A collective itself.
    """
    lengths = batch.tensors["attention_mask"].sum(dim=1).clamp(min=1)
    order = torch.argsort(lengths, descending=True, stable=True)
    parts: list[torch.Tensor] = []
    start = 0
    while start < len(order):
        ahead = lengths[order[start:]]
        tokens = ahead[0] * torch.arange(1, len(ahead) + 1) if padded else ahead.cumsum(0)
        stop = start + max(1, int((tokens <= max_tokens).sum()))
        parts.append(order[start:stop])
        start = stop
    wanted = torch.tensor(len(parts))
    if dist.is_initialized():
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=group)
    cut = [_trimmed(batch.rows(rows)) for rows in parts]
    return cut + [_without_response(batch)] * (int(wanted) - len(cut))


def _trimmed(batch: Batch) -> Batch:
    longest = max(1, int(batch.tensors["attention_mask"].sum(dim=1).max()))
    return batch.with_tensors(**{name: tensor[:, :longest] for name, tensor in batch.tensors.items() if tensor.ndim > 1})


def _without_response(batch: Batch) -> Batch:
    return Batch(tensors={name: tensor.new_zeros((1,) * min(tensor.ndim, 2)) for name, tensor in batch.tensors.items()}, meta=batch.meta)

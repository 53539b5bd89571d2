"""Cuts a rank's rows into forward passes of bounded size."""

import heapq

import torch
import torch.distributed as dist

from engine.batch import Batch


def micro_batches(batch: Batch, max_tokens: int, *, padded: bool, group: dist.ProcessGroup | None) -> list[Batch]:
    """`batch` in parts of at most `max_tokens` tokens each, trimmed to the longest row. A single longer row is a part of its own.

    Padding counts where passes are `padded`, and rows of similar length stand together then. Else only real tokens count, parts are as few as
    full ones give, and then about equally full, since ranks wait for each other in every pass.
    Sharded forwards are collectives, so every rank must make as many: the largest count in `group` (None: all ranks) decides, and a rank
    with fewer parts than that, or without any row, fills up with parts of one token and no response, which add nothing to a loss.
    A collective itself.
    """
    lengths = batch.tensors["attention_mask"].sum(dim=1).clamp(min=1).tolist()
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    parts = (_alike if padded else _full)(lengths, longest_first, max_tokens)
    wanted = torch.tensor(len(parts))
    if dist.is_initialized():
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=group)
    if not padded:
        parts = _even(lengths, longest_first, int(wanted), max_tokens) or parts
    cut = [_trimmed(batch.rows(torch.tensor(rows))) for rows in parts]
    return cut + [_without_response(batch)] * (int(wanted) - len(cut))


def _alike(lengths: list[int], longest_first: list[int], max_tokens: int) -> list[list[int]]:
    """Rows in order, as many a part as fit below `max_tokens` when all are as long as the first."""
    parts: list[list[int]] = []
    for row in longest_first:
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _full(lengths: list[int], longest_first: list[int], max_tokens: int) -> list[list[int]]:
    """First fit, longest rows first (Johnson 1973): at most 11/9 of the fewest possible parts, and one more."""
    parts: list[list[int]] = []
    tokens: list[int] = []
    for row in longest_first:
        place = next((part for part, sum_ in enumerate(tokens) if sum_ + lengths[row] <= max_tokens), len(parts))
        if place == len(parts):
            parts.append([])
            tokens.append(0)
        parts[place].append(row)
        tokens[place] += lengths[row]
    return parts


def _even(lengths: list[int], longest_first: list[int], count: int, max_tokens: int) -> list[list[int]]:
    """At most `count` parts, the fullest first: each row, longest first, goes to the emptiest (Graham 1969). None where one gets too full."""
    parts: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, part) for part in range(count)]
    for row in longest_first:
        tokens, part = emptiest[0]
        if tokens and tokens + lengths[row] > max_tokens:
            return []
        parts[part].append(row)
        heapq.heapreplace(emptiest, (tokens + lengths[row], part))
    return [parts[part] for tokens, part in sorted(emptiest, key=lambda filled: -filled[0]) if tokens]


def _trimmed(batch: Batch) -> Batch:
    longest = max(1, int(batch.tensors["attention_mask"].sum(dim=1).max()))
    return batch.with_tensors(**{name: tensor[:, :longest] for name, tensor in batch.tensors.items() if tensor.ndim > 1})


def _without_response(batch: Batch) -> Batch:
    return Batch(tensors={name: tensor.new_zeros((1,) * min(tensor.ndim, 2)) for name, tensor in batch.tensors.items()}, meta=batch.meta)

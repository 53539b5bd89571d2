"""What truncated answers do to a step: before the statistics of the groups, and after them. Formulas and names: `engine/config/truncated.py`."""

import torch
from torch import Tensor

from engine.algorithms.overlong import overlong_penalty
from engine.batch import Batch
from engine.config import OverlongPenalty, TruncatedConfig


def before_statistics(batch: Batch, config: TruncatedConfig, max_tokens: int) -> Batch:
    """The step as estimators are to see it.

    Args:
        batch: reward, finished, response_tokens [B]; kept [B] bool where something else has taken samples out already.
        config: what is done about truncated answers.
        max_tokens: the stage's `max_response_tokens`.

    Returns:
        The batch with `kept` without the truncated samples (`mask_before`), or with `reward` minus the penalty (`penalty`), or as it is.
    """
    if config.kind == "mask_before":
        finished = batch.tensors["finished"]
        return batch.with_tensors(kept=finished & batch.tensors.get("kept", finished))
    if isinstance(config, OverlongPenalty):
        return batch.with_tensors(reward=batch.tensors["reward"] + penalties(batch.tensors["response_tokens"], config, max_tokens))
    return batch


def after_statistics(advantages: Batch, batch: Batch, config: TruncatedConfig) -> Batch:
    """What `step_advantages` made of `batch`, with a loss_mask [B, T] without the truncated samples (`mask_after`), or as it is."""
    if config.kind != "mask_after":
        return advantages
    mask = advantages.tensors.get("loss_mask", batch.tensors["response_mask"])
    return advantages.with_tensors(loss_mask=mask & batch.tensors["finished"][:, None])


def valid(batch: Batch, config: TruncatedConfig) -> Tensor:
    """[B] bool: the samples that the statistics of their group count. Of response_mask [B, T], finished [B] and, where it is there, kept [B]."""
    columns = batch.tensors
    counted = columns["response_mask"].any(dim=1) & columns.get("kept", torch.tensor(True))
    return counted & columns["finished"] if config.kind == "mask_before" else counted


def penalties(tokens: Tensor, config: OverlongPenalty, max_tokens: int) -> Tensor:
    """What responses of these lengths [B] have added to their rewards: [B] float32, between -weight and 0."""
    return torch.tensor([config.weight * overlong_penalty(length, max_tokens, config.buffer_tokens) for length in tokens.tolist()])

"""Supervised fine-tuning: maximum likelihood of the assistant's tokens."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import SFTStageConfig
from engine.events import Emit, StageFinished, StageStarted, StepFinished, WeightsSynchronised
from engine.tokenizer import render_conversation
from engine.trainer.session import Session
from engine.trainer.skips import look_at_skips
from engine.trainer.timing import PhaseTimer

Conversation = Sequence[dict[str, str]]


def train_sft(session: Session, stage: str, config: SFTStageConfig, conversations: Sequence[Conversation], seed: int, emit: Emit) -> None:
    """Runs one SFT stage on the session's policy, then gives the rollout engine its weights.

    Raises `ValueError` when no conversation fits `max_tokens`, `NonFiniteGradientError` when too many updates in a row could not be taken.
    """
    started = time.perf_counter()
    emit(StageStarted(stage=stage, kind="sft", steps=config.steps))
    rows = _rendered(session.tokenizer, conversations, config.max_tokens)
    session.actor.load_rows(rows).get()
    session.begin_stage(config)
    for step in range(1, config.steps + 1):
        timer = PhaseTimer()
        with timer("update"):
            chosen = epoch_rows(len(rows), config.rows_per_step, step, seed)
            metrics = session.actor.update_sft(chosen).get().result()
        keep = partial(_keep, [rows[row] for row in chosen])
        look_at_skips(metrics, "policy", config.training.optimizer, session.directory, stage, step, keep, emit)
        throughput = metrics.pop("sft/tokens") / timer.elapsed()
        emit(StepFinished(stage=stage, step=step, metrics={**metrics, "throughput/tokens_per_second": throughput, **timer.metrics()}))
    emit(WeightsSynchronised.of(stage, config.steps, session.actor.synchronise().get()))
    emit(StageFinished(stage=stage, steps=config.steps, seconds=time.perf_counter() - started))


def epoch_rows(rows: int, rows_per_step: int, step: int, seed: int) -> list[int]:
    """Row numbers of step `step` (from 1): a pure function of (seed, step). Every epoch visits every row once, in its own order."""
    start = (step - 1) * rows_per_step
    chosen: list[int] = []
    for position in range(start, start + rows_per_step):
        epoch, offset = divmod(position, rows)
        if not chosen or offset == 0:
            order = np.random.default_rng([seed, epoch]).permutation(rows)
        chosen.append(int(order[offset]))
    return chosen


def _keep(rows: Sequence[tuple[list[int], list[bool]]], directory: Path) -> None:
    """Token ids, and which of them were to be learnt, of each row."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(list(rows), directory / "rows.pt")


def _rendered(tokenizer: Any, conversations: Sequence[Conversation], max_tokens: int) -> list[tuple[list[int], list[bool]]]:
    rendered = [render_conversation(tokenizer, messages) for messages in conversations]
    fitting = [row for row in rendered if len(row[0]) <= max_tokens]
    if not fitting:
        raise ValueError(f"none of {len(rendered)} conversations fits max_tokens={max_tokens}; the shortest has {min(len(r[0]) for r in rendered)}")
    return fitting

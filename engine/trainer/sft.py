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
from engine.prompts import content_hash
from engine.tokenizer import Row, render_conversation
from engine.trainer.session import Session
from engine.trainer.skips import look_at_skips
from engine.trainer.timing import PhaseTimer

Conversation = Sequence[dict[str, str]]


def train_sft(session: Session, stage: str, config: SFTStageConfig, conversations: Sequence[Conversation], seed: int, emit: Emit) -> None:
    """Runs one SFT stage on the session's policy, then gives the rollout engine its weights.

    Raises `ValueError` when no conversation fits `max_tokens`, or when the chat template cannot render one, which is named;
    `NonFiniteGradientError` when too many updates in a row could not be taken.
    """
    started = time.perf_counter()
    taught, held_out = split(conversations, config.validation.held_out_fraction if config.validation else 0.0)
    rows, too_long = rendered(session.tokenizer, taught, config.max_tokens)
    unseen, more = rendered(session.tokenizer, held_out, config.max_tokens) if held_out else ([], 0)
    counted, steps = {"data/too_long_rows": float(too_long + more)}, config.total_steps(len(rows))
    emit(StageStarted(stage=stage, kind="sft", steps=steps))
    session.actor.load_rows(rows + unseen).get()
    session.begin_stage(config.model_copy(update={"steps": steps, "epochs": None}))
    for step in range(1, steps + 1):
        timer = PhaseTimer()
        with timer("update"):
            chosen = epoch_rows(len(rows), config.rows_per_step, step, seed, config.epochs)
            metrics = session.actor.update_sft(chosen).get().result()
        keep = partial(_keep, [rows[row] for row in chosen])
        look_at_skips(metrics, "policy", config.training.optimizer, session.directory, stage, step, keep, emit)
        throughput = metrics.pop("sft/tokens") / timer.elapsed()
        if config.validation is not None and (step % config.validation.every_steps == 0 or step == steps):
            with timer("validate"):
                metrics |= session.actor.validate_sft(list(range(len(rows), len(rows) + len(unseen)))).get().result()
        emit(StepFinished(stage=stage, step=step, metrics={**metrics, **counted, "throughput/tokens_per_second": throughput, **timer.metrics()}))
        counted = {}
    emit(WeightsSynchronised.of(stage, steps, session.actor.synchronise().get()))
    emit(StageFinished(stage=stage, steps=steps, seconds=time.perf_counter() - started))


def epoch_rows(rows: int, rows_per_step: int, step: int, seed: int, epochs: int | None = None) -> list[int]:
    """Row numbers of step `step` (from 1): a pure function of (seed, step). Every epoch visits every row once, in its own order.

    With a number of `epochs` the last step has the rows that are left of them.
    """
    start = (step - 1) * rows_per_step
    stop = start + rows_per_step if epochs is None else min(start + rows_per_step, epochs * rows)
    chosen: list[int] = []
    for position in range(start, stop):
        epoch, offset = divmod(position, rows)
        if not chosen or offset == 0:
            order = np.random.default_rng([seed, epoch]).permutation(rows)
        chosen.append(int(order[offset]))
    return chosen


def _keep(rows: Sequence[Row], directory: Path) -> None:
    """Token ids, and which of them were to be learnt, of each row."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(list(rows), directory / "rows.pt")


def split(conversations: Sequence[Conversation], fraction: float) -> tuple[list[Conversation], list[Conversation]]:
    """Conversations to learn from, and a share held out: those with the smallest content hashes, at least one; none with a fraction of 0.

    ValueError where nothing would be left to learn from.
    """
    count = max(1, round(fraction * len(conversations))) if fraction else 0
    if count >= len(conversations):
        raise ValueError(
            f"{len(conversations)} conversations are too few to hold {count} of them out; lower validation.held_out_fraction or add rows"
        )
    hashes = [content_hash(conversation) for conversation in conversations] if count else []
    held_out = set(sorted(range(len(hashes)), key=hashes.__getitem__)[:count])
    return (
        [conversation for row, conversation in enumerate(conversations) if row not in held_out],
        [conversation for row, conversation in enumerate(conversations) if row in held_out],
    )


def rendered(tokenizer: Any, conversations: Sequence[Conversation], max_tokens: int) -> tuple[list[Row], int]:
    """Rows of all conversations that are no longer than `max_tokens`, and the number of those that are.

    ValueError where none is left, or a conversation cannot be rendered; it is named.
    """
    rows: list[Row] = []
    for number, messages in enumerate(conversations):
        try:
            rows += render_conversation(tokenizer, messages)
        except ValueError as error:
            raise ValueError(f"conversation {number} (from 0) that begins {messages[0]['content'][:60]!r}: {error}") from error
    fitting = [row for row in rows if len(row[0]) <= max_tokens]
    if not fitting:
        raise ValueError(f"none of {len(conversations)} conversations fits max_tokens={max_tokens}; the shortest has {min(len(r[0]) for r in rows)}")
    return fitting, len(rows) - len(fitting)

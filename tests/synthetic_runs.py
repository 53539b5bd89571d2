"""Runs that never ran: a record and an event log with curves from a known distribution, as real runs leave them."""

import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from unittest import mock

import numpy as np
from small_recipe import SMALL

from engine.events import StageStarted, StepFinished
from engine.statistics import Interval
from tasks import journal, record, reference, workspace
from tasks.accuracy import Accuracy
from tasks.compose import compose
from tasks.config import RecipeConfig
from tasks.journal import EvaluationFinished
from tasks.lineage import resolve
from tasks.record import RunRecord, StageRecord

LEVELS = {
    "sft": {"sft/loss": 1.0, "policy/gradient_norm": 2.0},
    "rl": {
        "reward/mean": 0.5,
        "policy/entropy": 0.6,
        "response/tokens_mean": 20.0,
        "policy/gradient_norm": 0.4,
        "policy/mean_log_prob_difference": 1e-6,
        "data/zero_signal_groups": 6.0,
        "policy/clip_fraction_high": 0.0,
    },
}
PHASES = {"generate": 0.5, "update": 0.3}


def evaluation(stage: str | None, mean: float) -> EvaluationFinished:
    interval = Interval(mean=mean, low=mean - 0.03, high=mean + 0.03)
    accuracy = Accuracy(samples_per_prompt=8, prompts=40, average=interval, greedy=interval, average_by_difficulty={}, greedy_by_difficulty={})
    return EvaluationFinished(label=stage or "base", stage=stage, trained_steps=0, accuracy=accuracy, seconds=1.0, tokens=10, rows=[])


def synthetic_run(
    config: RecipeConfig,
    name: str,
    *,
    commit: str | None = None,
    shift: Mapping[str, float] | None = None,
    until: float = 1.0,
    status: str = "finished",
    spread: float = 0.05,
    loudness: float = 0.0,
    log_of: Collection[str] | None = None,
) -> RunRecord:
    """A run of this configuration: every metric moves from half its level to its level, times what the seed makes of it, with noise.

    Args:
        config: whose seed decides everything.
        name: id.
        commit: of the code, as the record has it.
        shift: metric -> what is added, relative to its level.
        until: share of each stage's steps that is done.
        status: of the record.
        spread: of the seeds and of the noise, relative to the level.
        log_of: stages whose training the event log has, as of those that did not lie ready; all without it.
        loudness: of the seeds' noise, on a logarithmic scale: 0 gives all of them the same.
    """
    random, loud = np.random.default_rng(config.seed), np.random.default_rng([config.seed, 1])
    lineage = resolve(config).model_copy(update={"commit": commit, "uncommitted": False, "dataset_digests": {"train": f"{config.seed:064x}"}})
    found = RunRecord(run=name, recipe=config.name, seed=config.seed, lineage=lineage, started="2026-11-30T02:00:00+00:00")
    path = workspace.run_directory(name) / "events.jsonl"
    path.parent.mkdir(parents=True)
    events: list[journal.LoggedEvent] = [evaluation(None, 0.0)]
    for stage, settings in config.stages.items():
        steps = settings.steps
        assert steps is not None
        done = round(until * steps)
        events.append(StageStarted(stage=stage, kind=settings.kind, steps=steps))
        curves = {}
        for metric, level in LEVELS[settings.kind].items():
            rise = 1 - 0.5 * np.exp(-4 * np.arange(steps) / steps)
            seed = 1 + spread * random.normal()
            noise = spread * math.exp(loudness * loud.normal())
            curves[metric] = level * ((rise * seed + (shift or {}).get(metric, 0.0)) + noise * random.normal(size=steps))
        for step in range(done):
            timing = {f"timing/{phase}_seconds": seconds for phase, seconds in PHASES.items()}
            events.append(StepFinished(stage=stage, step=step + 1, metrics={name: float(curve[step]) for name, curve in curves.items()} | timing))
        accuracy = float(np.clip(0.6 + 0.4 * spread * random.normal() + (shift or {}).get("accuracy/average", 0.0), 0, 1))
        entry = StageRecord(name=stage, kind=settings.kind, status="finished", steps_planned=steps, steps=done)
        entry.seconds_by_phase = {phase: seconds * done for phase, seconds in PHASES.items()}
        entry.seconds = math.fsum(entry.seconds_by_phase.values())
        if until == 1.0:
            events.append(evaluation(stage, accuracy))
            entry.accuracy_before, entry.accuracy_after, entry.gain = 0.4, accuracy, accuracy - 0.4
        found.stages.append(entry)
    for number, event in enumerate(events):
        if log_of is not None and isinstance(event, StageStarted | StepFinished) and event.stage not in log_of:
            continue
        journal.append(path, event, time_ms=number)
    found.status, found.finished = status, "2026-11-30T02:10:00+00:00"  # type: ignore[assignment]
    record.write(found)
    return found


def as_json(text: str) -> dict:
    """What a program would read of it: no NaN outside of strings."""
    return json.loads(text, parse_constant=lambda constant: (_ for _ in ()).throw(ValueError(constant)))


WIDE = 3.0
"""Seeds of such a spread that whatever the small recipe learns lies between them."""


def store(root: Path, name: str, *overrides: str, spread: float = WIDE, seconds: float = 1.0) -> list[str]:
    """Writes a reference of the small recipe; returns its overrides."""
    settings = [*SMALL[1:], f"name={name}", *overrides]
    config = compose([SMALL[0], *settings])
    with mock.patch.dict(os.environ, {"ALMANAC_ROOT": str(root)}):
        seeded = [config.model_copy(update={"seed": seed}) for seed in range(1, 7)]
        names = [f"{name}-20261101-0000{one.seed:02}" for one in seeded]
        runs = [synthetic_run(one, run, spread=spread, loudness=spread) for one, run in zip(seeded, names, strict=True)]
        reference.write(reference.build(config, "grpo_tiny", settings, runs).model_copy(update={"seconds": seconds}))
    return settings


IN_NIGHTS = ["name=small", "stages.sft.steps=24", "stages.rl.steps=24"]
"""What the recipe has beside its file in the tests of nights: curves of 24 windows."""
SEEDLESS = compose([SMALL[0], *IN_NIGHTS])


def in_nights(seed: int) -> RecipeConfig:
    """The recipe of the tests of nights."""
    return SEEDLESS.model_copy(update={"seed": seed})


def eight_seeds() -> reference.Reference:
    """Its reference; the runs are written under the root."""
    runs = [synthetic_run(in_nights(seed), f"small-20261129-0000{seed:02}") for seed in range(1, 9)]
    return reference.build(SEEDLESS, "grpo_tiny", IN_NIGHTS, runs)

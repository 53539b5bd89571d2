"""How often the policy answers each prompt right: samples stored as they come, rates and their histogram, and the prompts within a range."""

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from engine.atomic import atomic_file
from engine.batch import Batch
from engine.events import Event, StageFinished, StageStarted, StepFinished
from engine.prompts import Prompt
from engine.rollout.plan import SamplePlan
from engine.trainer.samples import scored
from engine.trainer.session import Session
from tasks import page, plots
from tasks.schemas import DIFFICULTY, check
from tasks.stage_config import DifficultyStageConfig

ROLLOUTS, RATES, HISTOGRAM, PICTURE = "rollouts", "difficulty.parquet", "histogram.json", "histogram.png"

_SAMPLES = pa.schema(
    [
        ("prompt", pa.string()),
        ("sample", pa.int64()),
        ("outcome", pa.float64()),
        ("reward", pa.float64()),
        ("reward_status", pa.string()),
        ("response", pa.string()),
        ("response_tokens", pa.int64()),
        ("finished", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class Rating:
    """How a prompt was answered."""

    prompt: str
    """Its id."""
    data_source: str
    right: int
    """k."""
    samples: int
    """n."""

    @property
    def rate(self) -> float:
        """k/n."""
        return self.right / self.samples


def rate(
    session: Session,
    name: str,
    config: DifficultyStageConfig,
    prompts: Sequence[Prompt],
    seed: int,
    directory: Path,
    emit: Callable[[Event], None],
) -> list[Rating]:
    """Draws `samples_per_prompt` responses to every prompt with the session's policy, scores them, and writes what came out into `directory`.

    Each batch of prompts is stored whole as `rollouts/batch_NNNNN.parquet`; one that lies there already is not drawn again. Seeds depend on
    (seed, stage, prompt, sample), so what a resumed call finds is what one without a break would have found.

    Returns:
        One rating a prompt, in their order: recomputed from the stored samples, and written as `difficulty.parquet` and as a histogram.
    """
    started, size = time.perf_counter(), config.prompts_per_batch
    batches = [tuple(range(start, min(start + size, len(prompts)))) for start in range(0, len(prompts), size)]
    emit(StageStarted(stage=name, kind=config.kind, steps=len(batches)))
    session.load_prompts(name, prompts)
    session.reward.use(config.reward).get()
    for number, positions in enumerate(batches, start=1):
        path = batch_file(directory, number)
        if _holds(path, [prompts[position].id for position in positions], config.samples_per_prompt):
            continue
        began = time.perf_counter()
        drawn = (config.samples_per_prompt, config.sampling, config.max_response_tokens)
        plan = SamplePlan(name, positions, *drawn, seed, name, 0, length_extension=config.length_extension)
        samples = scored(session, plan)
        _store(samples, prompts, path)
        emit(StepFinished(stage=name, step=number, metrics=_metrics(samples, time.perf_counter() - began)))
    ratings = ratings_of(directory, prompts, config.right_above)
    write_ratings(ratings, within(ratings, config), directory)
    emit(StageFinished(stage=name, steps=len(batches), seconds=time.perf_counter() - started))
    return ratings


def batch_file(directory: Path, number: int) -> Path:
    """Where the samples of a batch lie; batches count from 1."""
    return directory / ROLLOUTS / f"batch_{number:05d}.parquet"


def ratings_of(directory: Path, prompts: Sequence[Prompt], right_above: float) -> list[Rating]:
    """The ratings that the stored samples in `directory` amount to."""
    columns = parquet.read_table(directory / ROLLOUTS, schema=_SAMPLES, columns=["prompt", "outcome"]).to_pydict()
    outcomes: dict[str, list[float]] = {}
    for prompt, outcome in zip(columns["prompt"], columns["outcome"], strict=True):
        outcomes.setdefault(prompt, []).append(outcome)
    return [
        Rating(prompt.id, prompt.data_source, sum(outcome > right_above for outcome in outcomes[prompt.id]), len(outcomes[prompt.id]))
        for prompt in prompts
    ]


def histogram(ratings: Sequence[Rating], samples: int) -> list[int]:
    """How many prompts have k right samples, for k = 0 .. n, the number of samples."""
    counts = [0] * (samples + 1)
    for rating in ratings:
        counts[rating.right] += 1
    return counts


def write_ratings(ratings: Sequence[Rating], kept: Collection[str], directory: Path) -> None:
    """One row a prompt as parquet, and the histogram as JSON and as a picture, which shows the prompts with the ids in `kept` too."""
    rows = [
        {"prompt": rating.prompt, "data_source": rating.data_source, "right": rating.right, "samples": rating.samples, "rate": rating.rate}
        for rating in ratings
    ]
    check(DIFFICULTY, rows, directory / RATES)
    with atomic_file(directory / RATES) as file:
        parquet.write_table(pa.Table.from_pylist(rows), file)
    counts = histogram(ratings, ratings[0].samples)
    with atomic_file(directory / HISTOGRAM) as file:
        file.write_text(json.dumps({"samples_per_prompt": len(counts) - 1, "prompts_by_right_samples": counts}, indent=2) + "\n")
    left = histogram([rating for rating in ratings if rating.prompt in kept], ratings[0].samples)
    with page.drawing(f"the picture of {directory / HISTOGRAM}"):
        plots.save(plots.histogram_figure(counts, left), directory / PICTURE)


def results(ratings: Sequence[Rating], kept: int) -> dict[str, float]:
    """What the stage found, in a few numbers; rates and shares are fractions of 1."""
    counts = histogram(ratings, ratings[0].samples)
    return {
        "prompts": float(len(ratings)),
        "kept": float(kept),
        "pass_rate": sum(rating.rate for rating in ratings) / len(ratings),
        "never_right_share": counts[0] / len(ratings),
        "always_right_share": counts[-1] / len(ratings),
    }


def within(ratings: Sequence[Rating], config: DifficultyStageConfig) -> set[str]:
    """Ids of the prompts whose pass rate is kept."""
    return {rating.prompt for rating in ratings if config.keep.min_rate <= rating.rate <= config.keep.max_rate}


def _holds(path: Path, ids: Sequence[str], samples: int) -> bool:
    """Whether a file has all samples of these prompts, and no others."""
    if not path.is_file():
        return False
    try:
        there = parquet.read_table(path, schema=_SAMPLES, columns=["prompt", "sample"]).to_pydict()
    except (OSError, ValueError):  # Damaged; Arrow's own errors are of these kinds.
        return False
    return list(zip(there["prompt"], there["sample"], strict=True)) == [(prompt, number) for prompt in ids for number in range(samples)]


def _store(samples: Batch, prompts: Sequence[Prompt], path: Path) -> None:
    columns: dict[str, list[Any]] = {name: samples.tensors[name].tolist() for name in ("sample", "outcome", "reward", "response_tokens", "finished")}
    columns["prompt"] = [prompts[position].id for position in samples.tensors["prompt"].tolist()]
    columns |= {name: list(samples.objects[name]) for name in ("reward_status", "response")}
    with atomic_file(path) as file:
        parquet.write_table(pa.table(columns, schema=_SAMPLES), file)


def _metrics(samples: Batch, seconds: float) -> dict[str, float]:
    tokens, finished = samples.tensors["response_tokens"], samples.tensors["finished"]
    return {
        "reward/mean": float(samples.tensors["reward"].double().mean()),
        "response/tokens_mean": float(tokens.double().mean()),
        "response/truncated_fraction": float((~finished).double().mean()),
        "throughput/tokens_per_second": float(tokens.sum()) / seconds,
        "timing/generate_seconds": seconds,
        "timing/step_seconds": seconds,
    }

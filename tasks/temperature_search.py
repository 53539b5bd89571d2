"""At which temperature an RL stage is to sample: accuracy, diversity and entropy of the policy over a grid, and the rule that picks one of them."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as parquet
from pydantic import BaseModel, ConfigDict

from engine.atomic import atomic_file
from engine.batch import Batch
from engine.control.future import join
from engine.events import Event, StageFinished, StageStarted, StepFinished
from engine.metrics import Mean, Statistics
from engine.prompts import Prompt
from engine.rollout.plan import SamplePlan
from engine.statistics import accuracy_interval
from engine.trainer.session import Session
from tasks import page, plots
from tasks.diversity import Units, common_length, diversity
from tasks.stage_config import GIVEN, TemperatureSearchStageConfig

RESULT, PICTURE, SAMPLES = GIVEN["temperature"], "temperature.png", "samples"
RESAMPLES, CONFIDENCE = 2000, 0.95
"""Of the intervals of accuracies; the rules do not look at them."""


class Written(BaseModel):
    """Part of `temperature.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Point(Written):
    """What the policy was like at one temperature."""

    temperature: float
    diversity: float
    used_share: float
    """Responses that were long enough to count for it."""
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    """Bootstrap interval over prompts, 95 %."""
    entropy: float
    """Nats per response token, of the policy at this temperature."""
    entropy_temperature_1: float
    """Of the same tokens, of the policy at 1."""
    tokens_mean: float
    truncated_fraction: float


class Picked(Written):
    """The temperature that a rule picks."""

    temperature: float
    diversity: float
    because: str
    warning: str | None = None
    """What the grid left open."""


class Search(Written):
    """`temperature.json`: the curve, what it was measured by, and what was picked."""

    prompts: int
    samples_per_prompt: int
    unit: str
    prefix_length: int | None
    """Units of each response that counted; None where responses counted whole."""
    rule: str
    matched_diversity: float | None
    """Of rule match_diversity: the one that was looked for."""
    points: list[Point]
    """By rising temperature."""
    picked: Picked

    @classmethod
    def read(cls, directory: Path) -> Self:
        """The search whose output a directory is."""
        return cls.model_validate_json((directory / RESULT).read_bytes())


def search(
    session: Session,
    name: str,
    config: TemperatureSearchStageConfig,
    prompts: Sequence[Prompt],
    matched: Search | None,
    seed: int,
    directory: Path,
    emit: Callable[[Event], None],
) -> Search:
    """Draws `samples_per_prompt` responses to the first `max_prompts` prompts at every temperature of the grid, and picks one by the rule.

    Seeds depend on (seed, stage, prompt, sample) and not on the temperature: temperatures are compared under common random numbers. Writes
    `temperature.json`, the curve as a picture, and every sample, a file for each temperature.

    Raises:
        ValueError: responses are too short to have a diversity; says what to change.
    """
    started, grid, asked = time.perf_counter(), config.grid.values(), list(prompts[: config.max_prompts])
    emit(StageStarted(stage=name, kind=config.kind, steps=len(grid)))
    session.load_prompts(name, asked)
    session.reward.use(config.reward).get()
    prefix = config.diversity.prefix_length or (None if matched is None else matched.prefix_length)
    points: list[Point] = []
    for number, temperature in enumerate(grid, start=1):
        began = time.perf_counter()
        sampling = config.sampling.model_copy(update={"temperature": temperature})
        samples: list[Batch] = []
        statistics = Statistics()
        for start in range(0, len(asked), config.prompts_per_batch):
            positions = tuple(range(start, min(start + config.prompts_per_batch, len(asked))))
            # The same stage and step whatever the temperature: seeds must not depend on it.
            how = (config.samples_per_prompt, sampling, config.max_response_tokens)
            plan = SamplePlan(name, positions, *how, seed, name, 0, length_extension=config.length_extension)
            batch, entropies = drawn(session, plan, config.max_tokens_per_micro_batch)
            samples.append(batch)
            statistics.update(entropies)
        _store(samples, asked, directory / SAMPLES / f"temperature_{temperature:.6f}.parquet")
        questions = _questions(samples, config.diversity.unit, config.samples_per_prompt)
        if config.diversity.equal_length and prefix is None:
            prefix = common_length([response for responses in questions for response in responses])
        points.append(_point(temperature, samples, statistics, questions, config, prefix, seed, name))
        emit(StepFinished(stage=name, step=number, metrics=_metrics(points[-1], samples, time.perf_counter() - began)))
    target = matched.picked.diversity if matched is not None else None
    picked = controlled_exploration(points, config.max_accuracy_loss) if target is None else match_diversity(points, target)
    found = Search(
        prompts=len(asked),
        samples_per_prompt=config.samples_per_prompt,
        unit=config.diversity.unit,
        prefix_length=prefix,
        rule=config.rule,
        matched_diversity=target,
        points=points,
        picked=picked,
    )
    _write(found, directory)
    emit(StageFinished(stage=name, steps=len(grid), seconds=time.perf_counter() - started))
    return found


def _write(found: Search, directory: Path) -> None:
    """The result, and then its picture."""
    with atomic_file(directory / RESULT) as file:
        file.write_text(found.model_dump_json(indent=2) + "\n")
    with page.drawing(f"the picture of {directory / RESULT}"):
        plots.save(plots.temperature_figure(found.points, found.picked.temperature, found.matched_diversity), directory / PICTURE)


def match_diversity(points: Sequence[Point], target: float) -> Picked:
    """The temperature whose diversity is nearest to the target, the lower one of two that are equally near (POLARIS: between stages)."""
    chosen = min(points, key=lambda point: (abs(point.diversity - target), point.temperature))
    low, high = (choose(point.diversity for point in points) for choose in (min, max))
    outside = f"the diversity to match, {target:.4g}, is outside of what the grid reaches, {low:.4g} to {high:.4g}; widen grid"
    return Picked(
        temperature=chosen.temperature,
        diversity=chosen.diversity,
        because=f"its diversity, {chosen.diversity:.4g}, is nearest to {target:.4g}",
        warning=None if low <= target <= high else outside,
    )


def controlled_exploration(points: Sequence[Point], max_accuracy_loss: float) -> Picked:
    """The highest temperature before the accuracy begins to fall (POLARIS: where performance begins to decline while diversity is maximal).

    From the temperature of the best accuracy on upwards, as long as no accuracy is more than `max_accuracy_loss` below the best.
    """
    best = max(range(len(points)), key=lambda number: points[number].accuracy)
    bound = points[best].accuracy - max_accuracy_loss
    fallen = next((number for number in range(best, len(points)) if points[number].accuracy < bound), None)
    chosen = points[-1 if fallen is None else fallen - 1]
    open_end = f"the accuracy has not begun to fall at grid.high={points[-1].temperature:g}; raise it"
    return Picked(
        temperature=chosen.temperature,
        diversity=chosen.diversity,
        because=f"it is the highest before the accuracy falls below {bound:.4g}, {max_accuracy_loss:g} less than at {points[best].temperature:g}",
        warning=open_end if fallen is None and len(points) > 1 else None,
    )


def results(found: Search) -> dict[str, float]:
    """What the stage found, in a few numbers."""
    point = next(point for point in found.points if point.temperature == found.picked.temperature)
    return {"temperature": point.temperature, "diversity": point.diversity, "accuracy_rate": point.accuracy, "entropy": point.entropy}


def drawn(session: Session, plan: SamplePlan, max_tokens: int) -> tuple[Batch, Statistics]:
    """The plan's samples, scored, and the entropies of the policy on them. The session's reward has been told how to score."""
    samples = session.actor.generate(plan)
    entropies = session.actor.entropies(samples, plan.sampling.temperature, max_tokens, plan.length_extension)
    batch = join(samples, session.reward.combine(session.reward.score(samples), {}, None)).get()
    return batch, entropies.get()


def _questions(batches: Sequence[Batch], unit: str, samples_per_prompt: int) -> list[list[Units]]:
    responses: list[Units] = [response for batch in batches for response in (_tokens(batch) if unit == "tokens" else _words(batch))]
    return [responses[start : start + samples_per_prompt] for start in range(0, len(responses), samples_per_prompt)]


def _tokens(batch: Batch) -> list[list[int]]:
    ids, mask = batch.tensors["input_ids"], batch.tensors["response_mask"]
    return [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]


def _words(batch: Batch) -> list[list[str]]:
    return [response.split() for response in batch.objects["response"]]


def _point(
    temperature: float,
    batches: Sequence[Batch],
    statistics: Statistics,
    questions: Sequence[Sequence[Units]],
    config: TemperatureSearchStageConfig,
    prefix: int | None,
    seed: int,
    name: str,
) -> Point:
    outcomes = [float(outcome > config.right_above) for batch in batches for outcome in batch.tensors["outcome"].tolist()]
    n = config.samples_per_prompt
    rates = [sum(outcomes[start : start + n]) / n for start in range(0, len(outcomes), n)]
    accuracy = accuracy_interval(rates, RESAMPLES, CONFIDENCE, seed)
    try:
        different = diversity(questions, prefix)
    except ValueError as error:
        other = ", or set unit=tokens" if config.diversity.unit == "words" else ""
        raise ValueError(
            f"stages.{name}.diversity: at temperature {temperature:g} {error} (unit={config.diversity.unit}); lower prefix_length{other}, or raise "
            f"stages.{name}.max_response_tokens"
        ) from error
    entropies = statistics.result()
    return Point(
        temperature=temperature,
        diversity=different.value,
        used_share=different.used_share,
        accuracy=accuracy.mean,
        accuracy_low=accuracy.low,
        accuracy_high=accuracy.high,
        entropy=entropies["policy/entropy"],
        entropy_temperature_1=entropies["policy/entropy_temperature_1"],
        tokens_mean=_mean(batches, "response_tokens"),
        truncated_fraction=1 - _mean(batches, "finished"),
    )


def _mean(batches: Sequence[Batch], column: str) -> float:
    return float(Mean.of([value for batch in batches for value in batch.tensors[column].double().tolist()]).result() or 0.0)


def _metrics(point: Point, batches: Sequence[Batch], seconds: float) -> dict[str, float]:
    tokens = sum(float(batch.tensors["response_tokens"].sum()) for batch in batches)
    return {
        "search/temperature": point.temperature,
        "search/diversity": point.diversity,
        "search/used_share": point.used_share,
        "search/accuracy": point.accuracy,
        "policy/entropy": point.entropy,
        "policy/entropy_temperature_1": point.entropy_temperature_1,
        "response/tokens_mean": point.tokens_mean,
        "response/truncated_fraction": point.truncated_fraction,
        "throughput/tokens_per_second": tokens / seconds,
        "timing/generate_seconds": seconds,
        "timing/step_seconds": seconds,
    }


def _store(batches: Sequence[Batch], prompts: Sequence[Prompt], path: Path) -> None:
    columns: dict[str, list[Any]] = {
        "prompt": [prompts[position].id for batch in batches for position in batch.tensors["prompt"].tolist()],
        "sample": [number for batch in batches for number in batch.tensors["sample"].tolist()],
        "outcome": [outcome for batch in batches for outcome in batch.tensors["outcome"].tolist()],
        "finished": [finished for batch in batches for finished in batch.tensors["finished"].tolist()],
        "tokens": [tokens for batch in batches for tokens in _tokens(batch)],
        "response": [response for batch in batches for response in batch.objects["response"]],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        parquet.write_table(pa.table(columns), file)

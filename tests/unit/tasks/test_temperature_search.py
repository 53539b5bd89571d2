"""Which temperature is picked, by rules on planted curves and with an engine whose answers depend on the temperature."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError

from engine.batch import Batch
from engine.config import RLStageConfig
from engine.events import Event, StageFinished, StepFinished
from engine.metrics import Mean, Statistics
from engine.prompts import Prompt
from engine.rollout.plan import SamplePlan
from tasks import temperature_search
from tasks.stage_config import GridConfig, TemperatureSearchStageConfig
from tasks.temperature_search import Picked, Point, Search, controlled_exploration, match_diversity, results, search

CAPS = {"max_prompt_tokens": 8, "max_response_tokens": 40}
ASKED = [Prompt(id=f"p{i}", index=i, messages=({"role": "user", "content": f"{i}"},), data_source="sums", ground_truth="1") for i in range(5)]


def config(**values: Any) -> TemperatureSearchStageConfig:
    plain = {"kind": "temperature_search", "grid": {"low": 0.5, "high": 1.5, "step": 0.25}, "samples_per_prompt": 4, "prompts_per_batch": 2, **CAPS}
    return TemperatureSearchStageConfig.model_validate(plain | values)


def points(accuracies: list[float], diversities: list[float]) -> list[Point]:
    rest = {"used_share": 1.0, "entropy": 1.0, "entropy_temperature_1": 0.5, "tokens_mean": 20.0, "truncated_fraction": 0.0}
    return [
        Point(temperature=1 + number / 10, accuracy=accuracy, accuracy_low=accuracy, accuracy_high=accuracy, diversity=different, **rest)
        for number, (accuracy, different) in enumerate(zip(accuracies, diversities, strict=True))
    ]


CURVE = points([0.5, 0.6, 0.59, 0.55, 0.2], [0.2, 0.3, 0.4, 0.6, 0.9])


@pytest.mark.parametrize(("target", "temperature"), [(0.31, 1.1), (0.5, 1.2), (0.51, 1.3), (0.2, 1.0), (0.9, 1.4)])
def test_the_diversity_is_matched_by_the_nearest(target: float, temperature: float) -> None:
    # 0.5 lies between 0.4 and 0.6: the lower temperature. Mutations: the first above the target; the largest diversity.
    picked = match_diversity(CURVE, target)
    assert (picked.temperature, picked.warning) == (temperature, None)


@pytest.mark.parametrize(("target", "temperature"), [(0.1, 1.0), (0.95, 1.4)])
def test_a_diversity_that_the_grid_does_not_reach_is_warned_of(target: float, temperature: float) -> None:
    picked = match_diversity(CURVE, target)
    assert picked.temperature == temperature
    assert picked.warning is not None
    assert "widen grid" in picked.warning


@pytest.mark.parametrize(
    ("accuracies", "loss", "temperature"),
    [
        ([0.5, 0.6, 0.59, 0.55, 0.2], 0.02, 1.2),
        ([0.5, 0.6, 0.59, 0.55, 0.2], 0.05, 1.3),
        ([0.5, 0.6, 0.59, 0.55, 0.2], 0.0, 1.1),
        # A rise after the fall is noise. Mutation: the highest of all that are within the loss gives 1.4.
        ([0.6, 0.5, 0.3, 0.6, 0.6], 0.02, 1.0),
        # Mutation: the fall is looked for from the lowest temperature on.
        ([0.1, 0.3, 0.6, 0.6, 0.1], 0.02, 1.3),
    ],
)
def test_exploration_ends_where_the_accuracy_begins_to_fall(accuracies: list[float], loss: float, temperature: float) -> None:
    picked = controlled_exploration(points(accuracies, [0.1, 0.2, 0.3, 0.4, 0.5]), loss)
    assert (picked.temperature, picked.warning) == (temperature, None)


def test_an_accuracy_that_has_not_fallen_is_warned_of() -> None:
    picked = controlled_exploration(points([0.5, 0.6], [0.1, 0.2]), 0.02)
    assert picked.temperature == 1.1
    assert picked.warning is not None
    assert "raise it" in picked.warning
    # A grid of one temperature leaves nothing open.
    assert controlled_exploration(points([0.5], [0.1]), 0.02).warning is None


def fake(drawn: list[SamplePlan]) -> Any:
    """Letters at random, the more different ones the hotter; answers are right below 1.2."""

    def draw(session: Any, plan: SamplePlan, max_tokens: int) -> tuple[Batch, Statistics]:
        drawn.append(plan)
        temperature, places = plan.sampling.temperature, plan.places()
        generator, length = np.random.default_rng([plan.seed, places[0][0]]), 40
        ids = torch.tensor(generator.integers(2, 2 + round(4 * temperature), size=(len(places), length)))
        mask = torch.ones(len(places), length, dtype=torch.bool)
        mask[:, :4] = False
        texts = ["".join(chr(97 + token) for token in row[4:].tolist()) for row in ids]
        columns = {
            "prompt": torch.tensor([position for position, _ in places]),
            "sample": torch.tensor([number for _, number in places]),
            "input_ids": ids,
            "response_mask": mask,
            "outcome": torch.tensor([float(temperature < 1.2) for _ in places]),
            "response_tokens": torch.full((len(places),), length - 4),
            "finished": torch.ones(len(places), dtype=torch.bool),
        }
        entropies = Statistics({"policy/entropy": Mean(temperature, 1.0), "policy/entropy_temperature_1": Mean(1.0, 1.0)})
        return Batch(columns, {"response": texts}), entropies

    return draw


class Session:
    """Stands for one: takes prompts and a reward."""

    def __init__(self) -> None:
        self.reward = self

    def load_prompts(self, name: str, prompts: Any) -> None:
        self.prompts = prompts

    def use(self, config: Any) -> "Session":
        return self

    def get(self) -> None:
        pass


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[SamplePlan]:
    made: list[SamplePlan] = []
    monkeypatch.setattr(temperature_search, "drawn", fake(made))
    return made


def found(directory: Path, events: list[Event] | None = None, matched: Search | None = None, **values: Any) -> Search:
    session: Any = Session()
    return search(session, "search", config(**values), ASKED, matched, 3, directory, (events if events is not None else []).append)


def test_the_whole_grid_is_evaluated_under_common_random_numbers(plans: list[SamplePlan], tmp_path: Path) -> None:
    # Mutation: a break at the end of the loop's body evaluates the first temperature alone.
    events: list[Event] = []
    curve = found(tmp_path, events)
    assert [point.temperature for point in curve.points] == [0.5, 0.75, 1.0, 1.25, 1.5]
    assert [event.metrics["search/temperature"] for event in events if isinstance(event, StepFinished)] == [0.5, 0.75, 1.0, 1.25, 1.5]
    assert isinstance(events[-1], StageFinished)
    # Mutation: a step of the seeds that counts the temperatures.
    assert {(plan.stage, plan.step, plan.seed) for plan in plans} == {("search", 0, 3)}
    assert [plan.prompts for plan in plans[:3]] == [(0, 1), (2, 3), (4,)]
    assert [point.entropy for point in curve.points] == [0.5, 0.75, 1.0, 1.25, 1.5]
    diversities = [point.diversity for point in curve.points]
    assert diversities == sorted(diversities)
    assert len(set(diversities)) == 5
    assert curve.picked.temperature == 1.0
    assert results(curve)["temperature"] == 1.0


def test_what_a_search_leaves(plans: list[SamplePlan], tmp_path: Path) -> None:
    curve = found(tmp_path)
    assert Search.read(tmp_path) == curve
    assert (tmp_path / "temperature.png").stat().st_size > 10_000
    stored = [pd.read_parquet(file) for file in sorted((tmp_path / "samples").iterdir())]
    assert [len(table) for table in stored] == [20] * 5
    # The curve can be computed again from what was stored.
    assert [table["outcome"].mean() for table in stored] == [point.accuracy for point in curve.points]
    assert set(map(len, stored[0]["tokens"])) == {36}


def test_a_search_is_not_lost_over_its_picture(plans: list[SamplePlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: draw without `page.drawing`; or before the curve is written."""

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(temperature_search.plots, "temperature_figure", broken)
    events: list[Event] = []
    curve = found(tmp_path, events)
    assert Search.read(tmp_path) == curve
    assert isinstance(events[-1], StageFinished)


def test_the_next_search_looks_for_the_diversity_of_the_one_before_on_prefixes_of_its_length(plans: list[SamplePlan], tmp_path: Path) -> None:
    first = found(tmp_path / "1", diversity={"prefix_length": 12})
    # Mutation: a prefix length of its own, 36.
    second = found(tmp_path / "2", matched=first, rule="match_diversity", matches="first")
    assert (second.prefix_length, second.matched_diversity) == (12, first.picked.diversity)
    # The same policy: the same temperature.
    assert second.picked.temperature == first.picked.temperature
    other = first.model_copy(update={"picked": Picked(temperature=9.0, diversity=first.points[3].diversity, because="")})
    assert found(tmp_path / "3", matched=other, rule="match_diversity", matches="first").picked.temperature == 1.25


def test_only_the_first_prompts_are_asked(plans: list[SamplePlan], tmp_path: Path) -> None:
    assert found(tmp_path, max_prompts=3).prompts == 3
    assert {position for plan in plans for position in plan.prompts} == {0, 1, 2}


def test_answers_without_white_space_have_no_words(plans: list[SamplePlan], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"stages\.search\.diversity: at temperature 0\.5 no response has 4 units \(unit=words\).* set unit=tokens"):
        found(tmp_path, diversity={"unit": "words"})


def test_a_grid_holds_its_ends() -> None:
    assert GridConfig(low=1.4, high=1.6, step=0.05).values() == [1.4, 1.45, 1.5, 1.55, 1.6]
    assert GridConfig(low=0.7, high=0.7).values() == [0.7]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"grid": {"low": 1.4, "high": 1.6, "step": 0.15}}, r"high \(1\.6\) is not low \(1\.4\) plus some steps of 0\.15"),
        ({"grid": {"low": 1.4, "high": 1.0}}, "is not low"),
        ({"sampling": {"temperature": 0.7}}, "what the search goes through"),
        ({"rule": "match_diversity"}, "matches is null"),
        ({"matches": "first"}, "rule=controlled_exploration, and matches is first"),
        ({"diversity": {"equal_length": False, "prefix_length": 9}}, "prefix_length"),
        ({"diversity": {"prefix_length": 3}}, "greater than or equal to 4"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config(**values)


def test_a_stage_has_one_temperature() -> None:
    training = {"optimizer": {"learning_rate": 1e-4}}
    plain = {"kind": "rl", "steps": 2, "prompts_per_step": 2, **CAPS, "training": training, "temperature_from": "search"}
    stage = RLStageConfig.model_validate(plain).at_temperature(1.45)
    assert stage.sampling.temperature == 1.45
    # What is written out is read again.
    assert RLStageConfig.model_validate(stage.model_dump()) == stage
    with pytest.raises(ValidationError, match="temperature_from=search gives one"):
        RLStageConfig.model_validate(plain | {"sampling": {"temperature": 1.4}})

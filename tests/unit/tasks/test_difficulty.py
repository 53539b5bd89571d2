"""Ratings of prompts: what is stored, what is made of it, and going on after a break, with an engine whose answers are a function of the seed."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as parquet
import pytest
import torch

from engine.batch import Batch
from engine.events import Event, StepFinished
from engine.prompts import Prompt, sample_seed
from engine.rollout.plan import SamplePlan
from tasks import difficulty
from tasks.data_error import DataError
from tasks.difficulty import Rating, batch_file, histogram, rate, ratings_of, results, within
from tasks.prompt_files import PROMPTS, write_kept
from tasks.stage_config import DifficultyStageConfig

CONFIG = DifficultyStageConfig(kind="difficulty", samples_per_prompt=4, max_prompt_tokens=8, max_response_tokens=8, prompts_per_batch=3)
ASKED = [Prompt(id=f"p{i}", index=i, messages=({"role": "user", "content": f"{i}"},), data_source="sums", ground_truth="1") for i in range(8)]


class Engine:
    """Stands for a session: prompt i is answered right by a share of its seeds that grows with i."""

    def __init__(self) -> None:
        self.reward = self
        self.drawn: list[SamplePlan] = []

    def load_prompts(self, name: str, prompts: Any) -> None:
        pass

    def use(self, config: Any) -> "Engine":
        return self

    def get(self) -> None:
        pass

    def scored(self, session: "Engine", plan: SamplePlan) -> Batch:
        self.drawn.append(plan)
        places = plan.places()
        seeds = [sample_seed(plan.seed, plan.stage, plan.step, ASKED[position].id, k) for position, k in places]
        outcomes = torch.tensor([float(seed % 7 < position) for seed, (position, _) in zip(seeds, places, strict=True)])
        ones = torch.ones(len(places))
        return Batch(
            {
                "prompt": torch.tensor([position for position, _ in places]),
                "sample": torch.tensor([k for _, k in places]),
                "outcome": outcomes,
                "reward": outcomes - 1,
                "response_tokens": ones.long(),
                "finished": ones.bool(),
            },
            {"reward_status": ["ok"] * len(places), "response": [str(seed) for seed in seeds]},
        )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(difficulty, "scored", made.scored)
    return made


def rated(engine: Any, directory: Path, emit: Any = lambda event: None, config: DifficultyStageConfig = CONFIG) -> list[Rating]:
    return rate(engine, "rate", config, ASKED, 5, directory, emit)


def test_ratings_are_those_of_the_stored_samples(engine: Engine, tmp_path: Path) -> None:
    # Mutations: rewards counted instead of outcomes (none is above 0); outcomes of another prompt.
    ratings = rated(engine, tmp_path)
    stored = pd.concat([pd.read_parquet(file) for file in sorted((tmp_path / "rollouts").iterdir())])
    right = stored.groupby("prompt")["outcome"].sum()
    assert [(rating.prompt, rating.right, rating.samples) for rating in ratings] == [(prompt.id, right[prompt.id], 4) for prompt in ASKED]
    assert ratings[0].right == 0
    assert ratings[7].right == 4
    table = pd.read_parquet(tmp_path / "difficulty.parquet")
    assert list(table.columns) == ["prompt", "data_source", "right", "samples", "rate"]
    assert (table["rate"] == table["right"] / table["samples"]).all()
    counts = json.loads((tmp_path / "histogram.json").read_text())["prompts_by_right_samples"]
    assert counts == [sum(rating.right == k for rating in ratings) for k in range(5)]
    assert (tmp_path / "histogram.png").stat().st_size > 1000


def test_ratings_are_not_lost_over_their_picture(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation: draw without `page.drawing`; or before the ratings are written.
    monkeypatch.setattr(difficulty.plots, "histogram_figure", lambda *counts: 1 / 0)
    assert len(rated(engine, tmp_path)) == len(pd.read_parquet(tmp_path / "difficulty.parquet")) == len(ASKED)


def test_a_killed_rating_goes_on_where_it_was_and_finds_the_same(engine: Engine, tmp_path: Path) -> None:
    whole = rated(engine, tmp_path / "whole")

    def kill(event: Event) -> None:
        if isinstance(event, StepFinished) and event.step == 2:
            raise KeyboardInterrupt

    engine.drawn.clear()
    with pytest.raises(KeyboardInterrupt):
        rated(engine, tmp_path / "killed", kill)
    # Mutations: draw what is stored again; seeds by batch; a batch that is written before it is complete.
    resumed = rated(engine, tmp_path / "killed")
    assert [plan.prompts for plan in engine.drawn] == [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert resumed == whole
    for number in (1, 2, 3):
        assert parquet.read_table(batch_file(tmp_path / "killed", number)).equals(parquet.read_table(batch_file(tmp_path / "whole", number)))


def test_the_size_of_batches_changes_no_sample(engine: Engine, tmp_path: Path) -> None:
    other = CONFIG.model_copy(update={"prompts_per_batch": 5})
    assert rated(engine, tmp_path / "three") == rated(engine, tmp_path / "five", config=other)


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_batch_that_is_damaged_or_of_other_prompts_is_drawn_again(engine: Engine, tmp_path: Path, damage: str) -> None:
    whole = rated(engine, tmp_path)
    engine.drawn.clear()
    path = batch_file(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:-20] if damage == "cut" else batch_file(tmp_path, 1).read_bytes())
    assert rated(engine, tmp_path) == whole
    assert [plan.prompts for plan in engine.drawn] == [(3, 4, 5)]


def test_right_is_an_outcome_above_the_bound(engine: Engine, tmp_path: Path) -> None:
    rated(engine, tmp_path)
    assert all(rating.right == 0 for rating in ratings_of(tmp_path, ASKED, right_above=1.0))


def test_the_range_of_rates_includes_its_ends() -> None:
    ratings = [Rating(f"p{k}", "sums", k, 8) for k in range(9)]
    # Mutation: `<` at either end.
    config = CONFIG.model_copy(update={"keep": CONFIG.keep.model_copy(update={"min_rate": 0.125})})
    assert within(ratings, config) == {f"p{k}" for k in range(1, 8)}
    assert histogram(ratings, 8) == [1] * 9
    found = results(ratings, 7)
    assert found == {"prompts": 9, "kept": 7, "pass_rate": 0.5, "never_right_share": 1 / 9, "always_right_share": 1 / 9}


def test_kept_prompts_are_the_data_sets_rows_and_none_left_is_an_error(tmp_path: Path) -> None:
    rows = [{"prompt": [dict(prompt.messages[0])], "data_source": "sums", "more": prompt.index} for prompt in ASKED]
    pd.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    # Without the first: a prompt's row is its index in the file. Mutation: positions in the list instead.
    write_kept(tmp_path / "train.parquet", ASKED[1:], {"p2", "p7", "p0"}, tmp_path / PROMPTS, "none")
    assert pd.read_parquet(tmp_path / PROMPTS)["more"].tolist() == [2, 7]
    with pytest.raises(DataError, match=r"train\.parquet: stages\.rate\.keep leaves none"):
        write_kept(tmp_path / "train.parquet", ASKED, set(), tmp_path / PROMPTS, "stages.rate.keep leaves none")

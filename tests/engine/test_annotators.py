"""Annotators under modes other than their own, as docs/extending.md says, and what an estimator of one's own sees of them."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy import prompt

from engine.config import (
    AlgorithmConfig,
    AnnotatorConfig,
    EngineConfig,
    OptimizerConfig,
    OwnAdvantageConfig,
    RewardConfig,
    RLStageConfig,
    RolloutConfig,
    StageTrainingConfig,
)
from engine.control.deadline import WorkerError
from engine.trainer.session import Session
from engine.trainer.sync import train_rl

MODULE = "whole_steps_of_ones_own"
TEXT = """
import json

import torch

from engine.algorithms.types import Advantages
from engine.batch import Batch
from engine.control.dispatch import RANK_ZERO, Mode, register
from engine.workers.base import Annotator


class LastRank(Mode):
    rowwise = True

    def ranks(self, mesh):
        return [len(mesh.part) - 1]

    def gather(self, results):
        return results[0]


class Share(Annotator):
    def annotate(self, rollout):
        rows = len(rollout)
        return Batch({"rows": torch.full((rows,), rows), "rank": torch.full((rows,), self.rank), "prompt": rollout.tensors["prompt"]})


class Whole(Share):
    @register(RANK_ZERO)
    def annotations(self, rollout):
        return super().annotations(rollout)


class Last(Share):
    @register(LastRank())
    def annotations(self, rollout):
        return super().annotations(rollout)


def write(inputs, config):
    with open(config.parameters["file"], "w") as file:
        json.dump({"group": inputs.group.tolist(), **{name: column.tolist() for name, column in inputs.columns.items()}}, file)
    return Advantages(inputs.mask.float())


def flat(inputs, config):
    return Advantages(inputs.rewards)
"""
PROMPTS = [prompt(f"{a}+1", index=a) for a in range(4)]


@pytest.fixture(scope="module")
def session(cluster: None, engine_config: EngineConfig, model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    directory = tmp_path_factory.mktemp("own")
    (directory / f"{MODULE}.py").write_text(TEXT)
    annotators = {name: AnnotatorConfig(worker=f"{MODULE}:{name.capitalize()}") for name in ("share", "whole", "last")}
    config = engine_config.model_copy(update={"annotators": annotators, "rollout": RolloutConfig(backend="transformers")})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.syspath_prepend(directory)
        with Session.open(config, model_directory, directory) as found:
            yield found
    sys.modules.pop(MODULE, None)


def train(session: Session, estimator: str, file: Path) -> None:
    stage = RLStageConfig(
        kind="rl",
        steps=1,
        prompts_per_step=4,
        samples_per_prompt=2,
        max_prompt_tokens=32,
        max_response_tokens=8,
        algorithm=AlgorithmConfig(advantage=OwnAdvantageConfig(estimator=f"{MODULE}:{estimator}", parameters={"file": str(file)})),
        reward=RewardConfig(default="exact_match"),
        training=StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-3)),
    )
    train_rl(session, "rl", stage, PROMPTS, 0, lambda event: None)


def test_a_mode_of_ones_own_decides_who_sees_which_rows(session: Session, tmp_path: Path) -> None:
    # Mutations: the mode of the base class for an overridden method; only registered modes on the way to a worker.
    train(session, "write", tmp_path / "seen.json")
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert {name: set(seen[f"{name}/rows"]) for name in ("share", "whole", "last")} == {"share": {4}, "whole": {8}, "last": {8}}
    assert {name: set(seen[f"{name}/rank"]) for name in ("share", "whole", "last")} == {"share": {0, 1}, "whole": {0}, "last": {1}}
    # Rows were put into another order since. Mutation: leave the annotations in the order in which they were made.
    assert seen["share/prompt"] == seen["whole/prompt"] == seen["last/prompt"] == seen["group"]


def test_an_estimator_that_gives_a_wrong_shape_stops_the_run_by_its_name(session: Session, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=re.escape(f"algorithm.advantage.estimator={MODULE}:flat: advantages has shape [8]")):
        train(session, "flat", tmp_path / "unused.json")

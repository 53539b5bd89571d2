"""What the actor makes of a step as a whole, apart from either engine: which samples have signal, which are rescued, what all are worth."""

from collections.abc import Sequence
from typing import Any

import torch

from engine.algorithms.coefficients import Coefficients
from engine.algorithms.rescue import RescueMemory
from engine.algorithms.selection import Visit, mean_outcomes
from engine.algorithms.step import measure, measure_trained, step_advantages
from engine.algorithms.truncation import after_statistics, before_statistics, penalties, valid
from engine.batch import Batch
from engine.config import OverlongPenalty, RLStageConfig
from engine.control.dispatch import DATA_PARALLEL, RANK_ZERO, register
from engine.metrics import Mean, Statistics
from engine.workers.base import TRAIN, StageConfig, TrainedWorker


class StepWorker(TrainedWorker):
    """One rank. Rank 0 sees all rows of a step, and keeps what is remembered from one step to the next."""

    _stage: StageConfig

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._coefficients = Coefficients()
        self._memory: RescueMemory | None = None

    def begin_memories(self) -> None:
        """What a stage of these settings remembers, at its start."""
        stage = self._stage
        self._coefficients = Coefficients.first(stage.algorithm) if isinstance(stage, RLStageConfig) else Coefficients()
        self._memory = RescueMemory(stage.rescue) if isinstance(stage, RLStageConfig) and stage.rescue is not None else None

    def memories(self) -> dict[str, Any]:
        """The coefficients that controllers move, and the right responses that a rescue takes from."""
        return {"coefficients": self._coefficients, "responses": self._memory and self._memory.state()}

    def take_memories(self, state: dict[str, Any]) -> None:
        """What `memories` gave, of a stage with the same settings."""
        self._coefficients = state["coefficients"]
        if self._memory is not None:
            self._memory.load_state(state["responses"])

    @register(DATA_PARALLEL, mesh=TRAIN)
    def outcomes(self, batch: Batch) -> Batch:
        """What says whether groups have signal: the tensors [B] prompt, outcome, weight_version, rescued where there is a memory, and valid.

        Valid samples are those that the statistics of their group count.
        """
        names = ["prompt", "outcome", "weight_version", *(name for name in ("rescued",) if name in batch.tensors)]
        return Batch({name: batch.tensors[name] for name in names} | {"valid": valid(batch, self._rl_stage.truncated)})

    @register(RANK_ZERO)
    def visits(self, batch: Batch) -> list[Visit]:
        """What each prompt of a step scored, of its samples as they were drawn."""
        columns = batch.tensors
        return mean_outcomes(columns["outcome"], columns["prompt"], columns.get("kept"))

    @register(RANK_ZERO)
    def rescue(self, batch: Batch, seed: Sequence[int]) -> Batch:
        """The step with remembered right responses in groups that have none, and the column rescued: see `RescueMemory`."""
        assert self._memory is not None, "a stage without rescue remembers nothing"
        return self._memory(batch, seed)

    @register(RANK_ZERO)
    def advantage(self, batch: Batch, step: int, group: list[int] | None) -> Batch:
        """What `step_advantages` makes of the whole step: advantages [B, T], returns for a critic, and which tokens the loss counts and selects.

        `group` has each row's group where that is not its prompt's.
        """
        stage, parts = self._rl_stage, self.meshes()[TRAIN].parts
        if group is not None:
            batch = batch.with_tensors(group=torch.tensor(group))
        before = before_statistics(batch, stage.truncated, stage.max_response_tokens)
        found = step_advantages(before, stage.algorithm, parts, stage.updates_per_step, (self.config.seed, step), self._coefficients.kl)
        return after_statistics(found, batch, stage.truncated)

    @register(RANK_ZERO)
    def measure(self, batch: Batch) -> Statistics:
        """What a step's samples and rewards were like, as they were drawn."""
        stage, statistics = self._rl_stage, measure(batch)
        if isinstance(stage.truncated, OverlongPenalty):
            found = penalties(batch.tensors["response_tokens"], stage.truncated, stage.max_response_tokens)
            statistics.add("reward/overlong_penalty_mean", Mean.of(found.tolist()))
        return statistics

    @register(RANK_ZERO)
    def measure_trained(self, batch: Batch) -> Statistics:
        """What is said of the samples that the step trains on."""
        return measure_trained(batch, self._rl_stage.algorithm)

    @property
    def _rl_stage(self) -> RLStageConfig:
        assert isinstance(self._stage, RLStageConfig), f"a call of an RL stage within a stage of kind {self._stage.kind}"
        return self._stage

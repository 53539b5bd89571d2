"""The critic: a value model of the policy's architecture (PPO, arXiv:1707.06347, section 5)."""

from pathlib import Path

import torch

from engine.algorithms import value as value_loss
from engine.algorithms.aggregation import Denominators, aggregate
from engine.batch import Batch
from engine.config import EngineConfig, RLStageConfig
from engine.control.dispatch import ALL, DATA_PARALLEL, METRICS, register
from engine.metrics import Statistics, Sum
from engine.workers.base import TRAIN, TrainedWorker


class CriticWorker(TrainedWorker):
    """One rank of the value model."""

    prefix = "critic"

    def __init__(self, config: EngineConfig, model_directory: Path, device: str, dtype: str, rank: int, ranks: int) -> None:
        super().__init__(config, model_directory, device, dtype, rank, ranks, head="value")

    @register(ALL)
    def begin_stage(self, config: RLStageConfig, directory: Path) -> None:
        """The policy's first weights with a value head at zero, and a fresh optimizer."""
        assert config.algorithm.critic is not None, "a stage without a critic does not begin one"
        self._stage, self._critic = config, config.algorithm.critic
        self.training.extend(config.length_extension)
        self.training.load(directory)
        self.start_optimizer(self._critic.optimizer, config.steps * config.updates_per_step)

    @register(DATA_PARALLEL, mesh=TRAIN)
    def values(self, rollout: Batch) -> Batch:
        """Value of the state before each response token, as the tensor values [B, T]."""
        return self.over_rows(rollout, self._max_tokens, lambda part: {"values": self.training.values(part)})

    @register(METRICS, mesh=TRAIN)
    def update(self, batch: Batch) -> Statistics:
        """`updates_per_step` optimizer steps on the value loss. Reads the rollout's token columns, values and returns [B, T]."""
        return self.updates(self.columns(batch, ["values", "returns"]), self._stage, self._loss)

    def _loss(self, batch: Batch, denominators: Denominators, statistics: Statistics) -> torch.Tensor:
        mask, old, returns = (batch.tensors[name].to(self.device) for name in ("response_mask", "values", "returns"))
        terms = value_loss.loss(self.training.values(batch), old, returns, mask, self._critic.clip)
        share = aggregate(terms.per_token, mask, denominators, "token_mean")
        statistics.update(terms.statistics)
        statistics.add("critic/loss", Sum(float(share.detach())))
        return share

    @property
    def _max_tokens(self) -> int:
        return self._stage.training.max_tokens_per_micro_batch

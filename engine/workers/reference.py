"""The reference: the policy that a stage began with, frozen."""

from pathlib import Path

from engine.batch import Batch
from engine.config import RLStageConfig
from engine.control.dispatch import ALL, DATA_PARALLEL, register
from engine.workers.base import TRAIN, TrainedWorker


class ReferenceWorker(TrainedWorker):
    """One rank of the reference policy. It has no optimizer."""

    prefix = "reference"

    @register(ALL)
    def begin_stage(self, config: RLStageConfig, directory: Path) -> None:
        """Takes the weights that the stage begins with, a Hugging Face directory."""
        self._stage = config
        self.training.extend(config.length_extension)
        self.training.load(directory)

    @register(DATA_PARALLEL, mesh=TRAIN)
    def log_prob(self, rollout: Batch) -> Batch:
        """Log-probs of the response tokens at the sampling temperature, as the tensor reference_log_probs [B, T]."""
        return self.reference_log_probs(rollout, self._stage)

"""How weights reach a vLLM engine in the process that trains. Importing this registers `in_process` with vLLM."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class NothingToAgree(WeightTransferInitInfo):
    """Trainer and engine share a process: there is no rendezvous."""


@dataclass
class InProcessWeights(WeightTransferUpdateInfo):
    """Tensors by checkpoint name, whole, in the engine's dtype."""

    weights: Iterable[tuple[str, torch.Tensor]] = field(default_factory=list)


class InProcessTransfer(WeightTransferEngine[NothingToAgree, InProcessWeights]):
    """vLLM's weight-transfer interface for a trainer in the same process: the tensors are handed over as they are."""

    init_info_cls = NothingToAgree
    update_info_cls = InProcessWeights

    def init_transfer_engine(self, init_info: NothingToAgree) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Gives the layers their loaders back, which vLLM drops after start-up."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, which also synchronises an accelerator: there may be none."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: InProcessWeights) -> None:
        """Runs the model's own loaders, which cut and fuse as the layers want it."""
        self.model.load_weights(update_info.weights)

    def finish_weight_update(self) -> None:
        """Packs the layers for their kernels again."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu" and getattr(self.model.config, "tie_word_embeddings", False):
            # Linear layers are packed for oneDNN at load. The tied head is not packed again by the reload and would go on
            # answering with the old weights, without a warning.
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(self.model.lm_head, remove_weight=False)

    def shutdown(self) -> None:
        """Nothing to release."""


WeightTransferEngineFactory.register_engine("in_process", InProcessTransfer)

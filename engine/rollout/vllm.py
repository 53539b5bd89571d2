"""Generation with vLLM in the process that trains. What vLLM reads from the environment is set in `engine.trainer.session`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from engine.config import RolloutConfig
from engine.rollout.backend import Request, Response


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


class VLLMBackend:
    """One vLLM engine for this rank, tensor parallel 1, on the rank's own device."""

    def __init__(self, model_directory: Path, config: RolloutConfig, dtype: torch.dtype, max_context_tokens: int, stop_token: int) -> None:
        self._stop_token = stop_token
        self._engine = LLM(
            model=str(model_directory),
            skip_tokenizer_init=True,
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=max_context_tokens,
            max_num_seqs=config.max_concurrent_samples,
            **_memory(config),
            enforce_eager=True,
            enable_prefix_caching=True,
            # Ranks of the trainer's process group, each an engine of its own.
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=1,
            # Log-probs of the distribution that tokens are drawn from, temperature applied.
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend="in_process"),
            disable_log_stats=True,
            seed=0,
        )

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """See `RolloutBackend`. Every request has a random stream of its own, so neither batching nor ranks change a response."""
        outputs = self._engine.generate(
            [{"prompt_token_ids": list(request.prompt_tokens)} for request in requests],
            [self._parameters(request) for request in requests],
            use_tqdm=False,
        )
        return [_response(output.outputs[0]) for output in outputs]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `RolloutBackend`."""
        self._engine.start_weight_update()
        self._engine.update_weights({"update_info": {"weights": weights}})
        self._engine.finish_weight_update()
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache after a synchronisation: blocks of the old weights would be reused")

    def _parameters(self, request: Request) -> SamplingParams:
        common = {
            "max_tokens": request.max_tokens,
            "logprobs": 0,
            "stop_token_ids": [self._stop_token],
            "detokenize": False,
            "flat_logprobs": True,
        }
        if request.sampling is None:
            return SamplingParams(temperature=0.0, **common)
        return SamplingParams(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            seed=request.seed,
            **common,
        )


def _memory(config: RolloutConfig) -> dict[str, float]:
    """What bounds the engine's memory: a share of the GPU, or so many bytes of cache on a CPU."""
    if torch.cuda.is_available():
        return {"gpu_memory_utilization": config.gpu_memory_fraction}
    return {"kv_cache_memory_bytes": int(config.kv_cache_gigabytes * 2**30)}


def _response(output: Any) -> Response:
    log_probs = [next(iter(position.values())).logprob for position in output.logprobs]
    return Response(tokens=list(output.token_ids), log_probs=log_probs, finished=output.finish_reason == "stop")

"""Generation with vLLM in the process that trains. Only an engine imports vLLM: seconds and a gigabyte, which a controller can do without."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from engine.config import LengthExtensionConfig, LoRAConfig, RolloutConfig
from engine.control.mesh import Mesh
from engine.reshard.layout import Tensor
from engine.reshard.proof import Proof
from engine.reshard.recording import Wanted
from engine.reshard.synchronise import Arrivals, Loaded
from engine.rollout.backend import Request, Response
from engine.rollout.limits import check_prompts
from engine.rollout.stop import StopTexts
from engine.rope import extended_frequencies
from engine.training.lora import export_adapter

MIN_TEMPERATURE = 0.01
"""vLLM quietly raises lower ones to this."""


class VLLMBackend:
    """One vLLM engine for each `tensor_parallel_ranks` consecutive ranks.

    They run it in lockstep: every rank has a scheduler of its own, and equal requests in equal order lead to equal steps. What vLLM reads from
    the environment is set by who starts the process.
    """

    def __init__(
        self,
        model_directory: Path,
        config: RolloutConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_context_tokens: int,
        tokenizer: Any,
        lora: LoRAConfig | None,
    ) -> None:
        from transformers import AutoConfig
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from engine.rollout.vllm_adapter import adapter_arguments
        from engine.rollout.weight_transfer import BACKEND

        self._max_context_tokens = max_context_tokens
        self._model_config = AutoConfig.from_pretrained(model_directory)
        self._plain_tables: list[torch.Tensor] | None = None
        self._tokenizer = tokenizer
        self._names = map(str, itertools.count())
        self._lora = lora
        self._adapter: Any = None
        self._adapter_numbers = itertools.count(1)
        self._llm = LLM(
            model=str(model_directory),
            skip_tokenizer_init=True,
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=max_context_tokens,
            **_for_context(self._model_config, max_context_tokens),
            max_num_seqs=config.max_concurrent_samples,
            **_for_device(config, device),
            enforce_eager=True,
            enable_prefix_caching=True,
            # Ranks of the trainer's process group.
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=config.tensor_parallel_ranks,
            # Log-probs of the distribution that tokens are drawn from, temperature applied.
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            **(adapter_arguments(model_directory, lora, dtype, device) if lora is not None else {}),
            disable_log_stats=True,
            seed=0,
        )
        # The engine's worker is an object of this process.
        self._transfer = self._llm.collective_rpc(lambda worker: worker.weight_transfer_engine)[0]
        self.weight_version: int | None = None

    @classmethod
    def mesh(cls, config: RolloutConfig, ranks: int) -> Mesh:
        """See `RolloutBackend`."""
        try:
            return Mesh.grouped(ranks, config.tensor_parallel_ranks)
        except ValueError as error:
            raise ValueError(f"rollout.tensor_parallel_ranks: {error}") from error

    def extend(self, extension: LengthExtensionConfig | None) -> None:
        """See `RolloutBackend`. vLLM keeps cosines and sines of all positions in a table, which is written anew where it lies."""
        tables = self._llm.apply_model(rotary_tables)[0]
        if self._plain_tables is None:
            self._plain_tables = [table.clone() for table in tables]
        for table, plain in zip(tables, self._plain_tables, strict=True):
            table.copy_(plain if extension is None or extension.changes_nothing else extended_table(self._model_config, extension, len(table)))
        self._forget_prefixes()

    def stream(self, requests: Sequence[Request]) -> Iterator[tuple[int, Response]]:
        """See `RolloutBackend`. Every request has a random stream of its own, so neither batching nor ranks change a response.

        Closing the iterator aborts what is unfinished; ranks that share an engine must then close it after the same response.
        Raises `RuntimeError` while another stream of this engine is open; `ValueError` when a prompt leaves no room for a response, or a
        temperature is too low for vLLM.
        """
        check_prompts(requests, self._max_context_tokens)
        engine = self._llm.llm_engine
        if engine.has_unfinished_requests():
            raise RuntimeError("the rollout engine still works on an earlier stream; exhaust or close that one first")
        unfinished: dict[str, tuple[int, StopTexts | None]] = {}
        try:
            for position, request in enumerate(requests):
                name = next(self._names)
                stop = request.sampling.stop if request.sampling else []
                unfinished[name] = position, StopTexts(self._tokenizer, stop) if stop else None
                # Blocks of the prefix cache are found by their weight version as well: none of old weights is used, whatever lies there.
                prompt = {"prompt_token_ids": list(request.prompt_tokens), "cache_salt": f"weights {self.weight_version}"}
                engine.add_request(name, prompt, self._parameters(request), lora_request=self._adapter)
            while unfinished:
                for output in engine.step():
                    position, texts = unfinished[output.request_id]
                    response = _response(output, texts)
                    if response is None:
                        continue
                    if not output.finished:
                        engine.abort_request([output.request_id])
                    del unfinished[output.request_id]
                    yield position, response
        finally:
            # One by one: vLLM frees the cache blocks of several in the order of a set, which differs between the ranks of an engine; sooner
            # or later they would find different prefixes in their caches and no longer step alike.
            for name in unfinished:
                engine.abort_request([name])

    def wants(self, tensors: Mapping[str, Tensor]) -> Wanted:
        """See `RolloutBackend`. Asks vLLM's own loaders."""
        return self._transfer.wants(tensors)

    def receive(self, arrivals: Arrivals, proof: Proof) -> Loaded:
        """See `RolloutBackend`."""
        self.weight_version = None
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"arrivals": arrivals, "proof": proof}})
        self._llm.finish_weight_update()
        self._forget_prefixes()
        self.weight_version = proof.version
        return self._transfer.loaded

    def load_adapter(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """See `RolloutBackend`. Raises what `check_adapter` raises when vLLM does not hold what it was given."""
        from vllm.lora.request import LoRARequest

        from engine.rollout.vllm_adapter import check_adapter

        assert self._lora is not None, "an engine that was started without training.lora takes no adapter"
        self.weight_version = None
        engine = self._llm.llm_engine
        if self._adapter is not None:
            engine.remove_lora(self._adapter.lora_int_id)
        number = next(self._adapter_numbers)
        # vLLM reads adapters from files. Without them it cannot load an old one again, which it would do quietly.
        with TemporaryDirectory(prefix="adapter-") as directory:
            files = Path(directory) / "adapter"
            export_adapter(files, weights, self._lora)
            self._adapter = LoRARequest(f"adapter-{number}", number, str(files))
            engine.add_lora(self._adapter)
        self._llm.apply_model(partial(check_adapter, weights=weights, scaling=self._lora.alpha / self._lora.rank))
        self._forget_prefixes()
        self.weight_version = version

    def _forget_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache after a synchronisation: blocks of the old weights would be reused")

    def _parameters(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        common = {
            "max_tokens": request.max_tokens,
            "logprobs": 0,
            "stop_token_ids": [self._tokenizer.eos_token_id],
            "detokenize": False,
            "flat_logprobs": True,
            "output_kind": RequestOutputKind.CUMULATIVE if sampling and sampling.stop else RequestOutputKind.FINAL_ONLY,
        }
        if sampling is None:
            return SamplingParams(temperature=0.0, **common)
        if sampling.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature: vLLM would draw at {MIN_TEMPERATURE} in place of {sampling.temperature}; "
                "choose at least that, or top_k=1 for the likeliest token"
            )
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=request.seed,
            **common,
        )


def _for_context(model: Any, max_context_tokens: int) -> dict[str, Any]:
    """vLLM refuses contexts beyond the model's own, which a length extension reaches."""
    native = getattr(model, "max_position_embeddings", None)
    return {"hf_overrides": {"max_position_embeddings": max_context_tokens}} if native is not None and native < max_context_tokens else {}


def rotary_tables(model: torch.nn.Module) -> list[torch.Tensor]:
    """Tables of cosines and sines [positions, rotary dimensions] of a model of vLLM, where it reads them. ValueError where RoPE is not plain."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase

    found = dict.fromkeys(module for module in model.modules() if isinstance(module, RotaryEmbeddingBase))
    if strange := [type(module).__name__ for module in found if type(module) is not RotaryEmbedding] or ([] if found else ["nothing"]):
        raise ValueError(f"length_extension: vLLM embeds positions by {strange[0]}, which is not plain RoPE; leave length_extension out")
    return [module.cos_sin_cache for module in found]


def extended_table(model: Any, extension: LengthExtensionConfig, positions: int) -> torch.Tensor:
    """Cosines, then sines, [positions, rotary dimensions] float32."""
    frequencies, attention = extended_frequencies(model, extension)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention


def _for_device(config: RolloutConfig, device: torch.device) -> dict[str, Any]:
    """What bounds the engine's memory is a share of the GPU, or so many bytes of cache on a CPU."""
    if device.type == "cuda":
        return {"gpu_memory_utilization": config.gpu_memory_fraction}
    return {"kv_cache_memory_bytes": int(config.kv_cache_gigabytes * 2**30), "worker_cls": "engine.rollout.cpu_worker.OwnMemoryCPUWorker"}


def _response(output: Any, texts: StopTexts | None) -> Response | None:
    """None while it goes on. With stop texts every step's output comes here, and its last token is new; without, only the last output."""
    drawn = output.outputs[0]
    stopped = texts is not None and texts.complete(drawn.token_ids[-1])
    if not (output.finished or stopped):
        return None
    log_probs = [next(iter(position.values())).logprob for position in drawn.logprobs]
    return Response(tokens=list(drawn.token_ids), log_probs=log_probs, finished=stopped or drawn.finish_reason == "stop")

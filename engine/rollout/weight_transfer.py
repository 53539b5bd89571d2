"""How weights reach a vLLM engine in the process that trains. Importing this registers `reshard` with vLLM.

Slices go straight into the storage that the engine computes with. A layer that is kept in another form (packed for oneDNN on a CPU, shuffled or
quantised) is put aside until it is complete, and then goes through vLLM's own processing, layer by layer.
"""

import ctypes
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from engine.reshard.landing import Landings, Place
from engine.reshard.layout import Tensor
from engine.reshard.plan import Piece
from engine.reshard.proof import Proof
from engine.reshard.recording import Wanted
from engine.reshard.rollout_layout import record
from engine.reshard.synchronise import Arrivals, Loaded

BACKEND = "reshard"
UNCHANGED = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Ways of computing that take a weight as it was loaded, where the layer still has it afterwards."""
TRIM_EVERY_BYTES = 64 * 2**20
"""Of layers put aside, after which the C library gives back what was freed: it would keep a good part of every layer (measured with glibc)."""


@dataclass
class NothingToAgree(WeightTransferInitInfo):
    """Trainer and engine share a process: there is no rendezvous."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """One synchronisation."""

    arrivals: Arrivals
    proof: Proof


@dataclass
class _Layer:
    """A module whose weights are on their way, and what has come of them."""

    name: str
    module: Any
    missing: int
    """Elements that are to come before it is complete."""
    seen: list[tuple[Piece, Place]] = field(default_factory=list)


class ReshardTransfer(WeightTransferEngine[NothingToAgree, Update]):
    """vLLM's weight-transfer interface for slices of checkpoint tensors."""

    init_info_cls = NothingToAgree
    update_info_cls = Update

    loaded: Loaded
    """How the last update went."""

    def init_transfer_engine(self, init_info: NothingToAgree) -> None:
        """Nothing to set up."""

    def wants(self, tensors: Mapping[str, Tensor]) -> Wanted:
        """What this rank takes of the checkpoint's tensors: its own model's loaders are run without values, and watched.

        Raises ValueError where a loader does more than cut, or a parameter is not filled to its last element.
        """
        modules, tied = list(self.model.modules()), dict[int, nn.Parameter]()
        for module in modules:
            kept = dict(module._parameters)
            self._take_out(module)
            for name, parameter in kept.items():
                if parameter is not None and module._parameters.get(name) is not None:
                    module._parameters[name] = tied.setdefault(id(parameter), module._parameters[name])
        try:
            wanted = record(self.model, tensors)
        finally:
            for module in modules:
                info = layerwise.get_layerwise_info(module)
                layerwise._place_kernel_tensors(module, info)
                info.reset()
        for module in modules:
            if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                # vLLM packs embeddings as well, in case they are a head. Nothing packed cannot be stale.
                module.cpu_linear = torch.nn.functional.linear
        self._landings = Landings(wanted)
        self._owners = {
            f"{name}.{parameter}" if name else parameter: (name, module, parameter)
            for name, module in self.model.named_modules()
            for parameter in module._parameters
        }
        return wanted

    def start_weight_update(self) -> None:
        """Layers are taken apart when their first slice comes."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, which also synchronises an accelerator: there may be none."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """Puts every slice where it belongs; completes each layer when its last one has come."""
        proof, layers = update_info.proof, dict[str, _Layer]()
        self._packing, self._staged, self._most_staged, self._freed = 0.0, 0, 0, 0
        straight: list[tuple[Piece, Place]] = []
        try:
            for piece, values in update_info.arrivals:
                for place in self._landings.places(piece):
                    owner, module, parameter = self._owners[place.parameter]
                    if self._kept(module, parameter):
                        straight.append((piece, place))
                    else:
                        if owner not in layers:
                            layers[owner] = self._open(owner, module)
                        layers[owner].seen.append((piece, place))
                        layers[owner].missing -= place.elements
                    place.put(getattr(module, parameter).data, values)
                    if owner in layers and not layers[owner].missing:
                        self._close(layers.pop(owner), proof)
            for piece, place in straight:
                _, module, parameter = self._owners[place.parameter]
                self._show(piece, place, getattr(module, parameter), proof)
            self._finish(proof)
        finally:
            for layer in layers.values():  # Only where something failed: the engine gets back what it had.
                info = layerwise.get_layerwise_info(layer.module)
                layerwise._place_kernel_tensors(layer.module, info)
                info.reset()
        self.loaded = Loaded(self._packing, self._most_staged)

    def finish_weight_update(self) -> None:
        """All is done when the last slice is in its place."""

    def shutdown(self) -> None:
        """Nothing to release."""

    def _kept(self, module: nn.Module, name: str) -> bool:
        """Whether the module computes with this parameter as it was loaded."""
        info = layerwise.get_layerwise_info(module)
        if info.kernel_tensors is not None:  # It is taken apart.
            return name in meta.SKIP_TENSORS
        loaded, now = info.restore_metadata[0].get(name), getattr(module, name)
        if loaded is None:
            return True
        return type(getattr(module, "quant_method", None)) in UNCHANGED and now.shape == loaded.shape and now.dtype == loaded.dtype

    def _take_out(self, module: nn.Module) -> None:
        """Parameters as the loaders want them, without values; those of the kernels are put aside."""
        info = layerwise.get_layerwise_info(module)
        info.kernel_tensors = get_layer_params_buffers(module)
        info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
        meta.restore_layer_on_meta(module, info)

    def _open(self, name: str, module: nn.Module) -> _Layer:
        self._take_out(module)
        meta.materialize_layer(module, layerwise.get_layerwise_info(module))
        missing = 0
        for parameter in (parameter for parameter in module._parameters if not self._kept(module, parameter)):
            expected = self._landings.elements.get(f"{name}.{parameter}", 0)
            missing += expected
            data = getattr(module, parameter).data
            if expected < data.numel():
                data.zero_()  # padding
            self._staged += data.nbytes
        self._most_staged = max(self._most_staged, self._staged)
        return _Layer(name, module, missing)

    def _close(self, layer: _Layer, proof: Proof) -> None:
        module, loaded = layer.module, dict(layer.module.named_parameters(recurse=False))
        for piece, place in layer.seen:
            self._show(piece, place, loaded[self._owners[place.parameter][2]], proof)
        started = time.perf_counter()
        layerwise._layerwise_process(module, layerwise.get_layerwise_info(module))
        self._packing += time.perf_counter() - started
        freed = sum(loaded[parameter].nbytes for parameter in {self._owners[place.parameter][2] for _, place in layer.seen})
        self._staged -= freed
        self._freed += freed
        if isinstance(module.quant_method, UnquantizedLinearMethod):
            proof.packed(f"{layer.name}.weight", partial(_product, module), loaded["weight"])
        if self.device.type == "cpu" and self._freed > TRIM_EVERY_BYTES:
            self._freed = 0
            _trim()

    def _show(self, piece: Piece, place: Place, parameter: torch.Tensor, proof: Proof) -> None:
        if place.whole:
            proof.landed(piece, place.seen(parameter.data, piece))

    def _finish(self, proof: Proof) -> None:
        for name, module in self.model.named_modules():
            if is_deferred_attention_layer(module):
                module.process_weights_after_loading(self.model_config.dtype)
            elif isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                # A packed copy beside the weight, which may be tied to the embedding: it would go on answering with the old one, without a warning.
                started = time.perf_counter()
                module.quant_method.process_weights_after_loading(module)
                self._packing += time.perf_counter() - started
                proof.packed(f"{name}.weight", partial(_product, module), module.weight.data)


def _product(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """[rows, out], as the layer computes it, without its bias."""
    result: torch.Tensor = module.quant_method.apply(module, inputs, None)
    return result


def _trim() -> None:
    """Gives the host's freed memory back to the system, where the C library can."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


WeightTransferEngineFactory.register_engine(BACKEND, ReshardTransfer)

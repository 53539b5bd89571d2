"""A hybrid actor that tests reach into: whatever a test wants seen or broken in a worker's process is a function below."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
import torch

import engine.trainer.session as session_module
from engine.config import EngineConfig
from engine.control.dispatch import ALL, register
from engine.trainer.session import Session
from engine.workers.actor import HybridActor

# Workers cannot import test modules.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class ProbedActor(HybridActor):
    @register(ALL)
    def apply(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self, *arguments)


@contextmanager
def open_probed(config: EngineConfig, model_directory: Path, directory: Path) -> Iterator[Session]:
    with patch.object(session_module, "HybridActor", ProbedActor), Session.open(config, model_directory, directory) as session:
        yield session


def weights(session: Session) -> dict[str, torch.Tensor]:
    """Every parameter of the trainer, whole."""
    first, *others = session.actor.apply(_full_weights).get()
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    return first


def process_ids(session: Session) -> list[int]:
    return session.actor.apply(_process_id).get()


def remember(actor: Any) -> None:
    actor.remembered = {name: _local(parameter).clone() for name, parameter in _parameters(actor)}


def restore(actor: Any) -> None:
    for name, parameter in _parameters(actor):
        _local(parameter).copy_(actor.remembered[name])


def die_at_the_next_update(actor: Any, rank: int) -> None:
    if actor.rank == rank:
        actor.training.optimizer_step = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def forget_to_pack_the_head(actor: Any) -> None:
    """The synchronisation without its last line: what vLLM's own reload does."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

    from engine.rollout.weight_transfer import InProcessTransfer

    actor.original_finish = InProcessTransfer.finish_weight_update
    InProcessTransfer.finish_weight_update = lambda transfer: finalize_layerwise_reload(transfer.model, transfer.model_config)


def pack_the_head_again(actor: Any) -> None:
    from engine.rollout.weight_transfer import InProcessTransfer

    InProcessTransfer.finish_weight_update = actor.original_finish


def forget_the_temperature(actor: Any) -> None:
    score = type(actor.training).score
    actor.training.score = lambda batch, temperature: score(actor.training, batch, 1.0)


def heed_the_temperature_again(actor: Any) -> None:
    del actor.training.score


def tell_at_once(actor: Any) -> None:
    """Every sample as soon as it is finished: a toy's whole rollout takes less time than lies between two tellings."""
    import engine.workers.actor

    engine.workers.actor.SECONDS_BETWEEN_TELLINGS = 0.0


def keep_the_prefix_cache(actor: Any) -> None:
    actor._rollout._llm.reset_prefix_cache = lambda: True


def reset_the_prefix_cache_again(actor: Any) -> None:
    del actor._rollout._llm.reset_prefix_cache


def skip_the_adapter(actor: Any) -> None:
    actor._rollout.load_adapter = lambda weights: None


def load_the_adapter_again(actor: Any) -> None:
    del actor._rollout.load_adapter


def base(actor: Any) -> dict[str, torch.Tensor]:
    """Every frozen parameter of the trainer, whole."""
    from engine.training.lora import base_name
    from engine.training.shards import whole

    return {base_name(name): whole(parameter).clone() for name, parameter in _parameters(actor) if not parameter.requires_grad}


def adapter_bytes(actor: Any) -> int:
    """Of the whole adapter in the rollout's dtype."""
    return sum(tensor.numel() * 4 for tensor in actor.training.adapter_weights(torch.float32).values())


def multiply_the_base(actor: Any, wanted: str, factor: float) -> None:
    from engine.training.lora import base_name

    (parameter,) = (parameter for name, parameter in _parameters(actor) if base_name(name) == wanted)
    _local(parameter).mul_(factor)


def _parameters(actor: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return list(actor.training._parameters().items())


def _local(parameter: Any) -> torch.Tensor:
    return parameter.detach().to_local()


def _full_weights(actor: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.training.full_weights(torch.float32)}


def _process_id(actor: Any) -> int:
    return os.getpid()

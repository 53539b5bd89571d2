"""A hybrid actor that tests reach into: whatever a test wants seen or broken in a worker's process is a function below."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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


def send_changes_only(actor: Any, only: bool) -> None:
    """As if `rollout.changed_only` had said so from the start."""
    actor.config = actor.config.model_copy(update={"rollout": actor.config.rollout.model_copy(update={"changed_only": only})})
    actor._synchroniser = actor._plan_synchronisations()


def break_synchronisation(actor: Any, rank: int, fault: Callable[[Any], Callable[[], None]]) -> None:
    """Puts a fault into one rank's next synchronisations; `fault(actor)` gives back what mends it."""
    if actor.rank == rank:
        actor.mend = fault(actor)


def mend_synchronisation(actor: Any) -> None:
    actor.__dict__.pop("mend", lambda: None)()


def bound_the_proof(actor: Any, share: float | None) -> None:
    """A bound that no synchronisation of a toy keeps: each compares the least share, whatever anything takes. None takes it away."""
    import engine.reshard.proof

    engine.reshard.proof.LEAST_SHARE = share or 1.0
    synchroniser = actor._synchroniser
    synchroniser._max_proof_share, synchroniser._coverage = share and 1e-9, synchroniser._coverage.following(share or 1.0)


def _replaced(owner: Any, name: str, value: Any) -> Callable[[], None]:
    replacing = patch.object(owner, name, value)
    replacing.start()
    return replacing.stop


def head_not_packed(actor: Any) -> Callable[[], None]:
    """What vLLM's own reload does."""
    transfer = actor._rollout._transfer

    def finish(proof: Any) -> None:
        head = transfer.model.lm_head
        with patch.object(head.quant_method, "process_weights_after_loading", lambda module: None):
            type(transfer)._finish(transfer, proof)

    return _replaced(transfer, "_finish", finish)


def head_not_packed_nor_proved(actor: Any) -> Callable[[], None]:
    return _replaced(actor._rollout._transfer, "_finish", lambda proof: None)


def layer_not_packed(actor: Any) -> Callable[[], None]:
    """One layer goes on with the matrix that it was packed with before."""
    from engine.rollout.weight_transfer import layerwise

    process, down = layerwise._layerwise_process, actor._rollout._transfer.model.model.layers[1].mlp.down_proj

    def skip(layer: Any, info: Any) -> None:
        old = getattr(layer, "cpu_linear", None)
        process(layer, info)
        if layer is down:
            layer.cpu_linear = old

    return _replaced(layerwise, "_layerwise_process", skip)


SWAPPED = {f"model.layers.{one}.mlp.up_proj.weight": f"model.layers.{1 - one}.mlp.up_proj.weight" for one in range(2)}
"""Two tensors of one shape."""


def tensors_swapped(actor: Any) -> Callable[[], None]:
    """They come under each other's name."""
    rollout = actor._rollout
    receive = rollout.receive

    def swapped(arrivals: Any, proof: Any) -> Any:
        return receive(((replace(piece, tensor=SWAPPED.get(piece.tensor, piece.tensor)), values) for piece, values in arrivals), proof)

    return _replaced(rollout, "receive", swapped)


def places_swapped(actor: Any) -> Callable[[], None]:
    """They land in each other's place, and are looked for there."""
    landings = actor._rollout._transfer._landings
    places = landings.places
    return _replaced(landings, "places", lambda piece: places(replace(piece, tensor=SWAPPED.get(piece.tensor, piece.tensor))))


def row_stale(actor: Any) -> Callable[[], None]:
    from engine.reshard.landing import Place

    put = Place.put

    def all_but_a_row(place: Any, parameter: torch.Tensor, values: torch.Tensor) -> None:
        row = parameter[3].clone()
        put(place, parameter, values)
        if place.parameter == "model.embed_tokens.weight":
            parameter[3] = row

    return _replaced(Place, "put", all_but_a_row)


def weights_stale(actor: Any) -> Callable[[], None]:
    from engine.reshard.landing import Place

    return _replaced(Place, "put", lambda place, parameter, values: None)


def version_behind(actor: Any) -> Callable[[], None]:
    rollout = actor._rollout
    receive = rollout.receive

    def late(arrivals: Any, proof: Any) -> Any:
        loaded = receive(arrivals, proof)
        rollout.weight_version -= 1
        return loaded

    return _replaced(rollout, "receive", late)


def slices_lost(actor: Any) -> Callable[[], None]:
    rollout = actor._rollout
    receive = rollout.receive
    return _replaced(rollout, "receive", lambda arrivals, proof: receive((one for one in arrivals if one[0].tensor != "model.norm.weight"), proof))


def rank_dies(actor: Any) -> Callable[[], None]:
    rollout = actor._rollout

    def die(arrivals: Any, proof: Any) -> None:
        next(arrivals)
        os.kill(os.getpid(), signal.SIGKILL)

    return _replaced(rollout, "receive", die)


def cache_without_versions(actor: Any) -> Callable[[], None]:
    """Blocks of the prefix cache are kept, and found whatever weights they were made with."""
    rollout = actor._rollout
    engine = rollout._llm.llm_engine
    add = engine.add_request
    stops = [
        _replaced(rollout._llm, "reset_prefix_cache", lambda: True),
        _replaced(engine, "add_request", lambda name, prompt, *rest, **named: add(name, prompt | {"cache_salt": "all"}, *rest, **named)),
    ]
    return lambda: [stop() for stop in stops] and None


def cache_kept(actor: Any) -> Callable[[], None]:
    return _replaced(actor._rollout._llm, "reset_prefix_cache", lambda: True)


def forget_the_temperature(actor: Any) -> None:
    score = type(actor.training).score
    actor.training.score = lambda batch, temperature, *measures: score(actor.training, batch, 1.0, *measures)


def heed_the_temperature_again(actor: Any) -> None:
    del actor.training.score


def disagree(actor: Any, nats: float, every: int) -> None:
    """Of every so many responses the rollout reports log-probs that are too low by so much; 0 mends it."""
    actor._rollout.__dict__.pop("stream", None)
    if not nats:
        return
    stream = actor._rollout.stream

    def misreport(requests: Any) -> Iterator[tuple[int, Any]]:
        for position, response in stream(requests):
            low = position % every == 0
            yield position, replace(response, log_probs=[value - nats for value in response.log_probs]) if low else response

    actor._rollout.stream = misreport


def lose_the_loss(actor: Any, rank: int) -> None:
    """From now on one rank's share of the policy's loss is no number, in RL and SFT."""
    for name in LOSSES if actor.rank == rank else ():
        share = getattr(type(actor), name)
        setattr(actor, name, lambda *arguments, share=share, **named: share(actor, *arguments, **named) * float("nan"))


def find_the_loss_again(actor: Any) -> None:
    for name in LOSSES:
        actor.__dict__.pop(name, None)


LOSSES = ("_policy_loss", "_likelihood_loss")


def coefficients(actor: Any) -> Any:
    return actor.own_state()["coefficients"]


def tell_at_once(actor: Any) -> None:
    """Every sample as soon as it is finished: a toy's whole rollout takes less time than lies between two tellings."""
    import engine.workers.actor

    engine.workers.actor.SECONDS_BETWEEN_TELLINGS = 0.0


def skip_the_adapter(actor: Any) -> None:
    actor._rollout.load_adapter = lambda weights, version: setattr(actor._rollout, "weight_version", version)


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


def leave_the_trainer_plain(actor: Any) -> None:
    actor.training.extend = lambda extension: None


def extend_the_trainer_again(actor: Any) -> None:
    del actor.training.extend


def _parameters(actor: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return list(actor.training.parameters().items())


def _local(parameter: Any) -> torch.Tensor:
    return parameter.detach().to_local()


def _full_weights(actor: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.training.full_weights(torch.float32)}


def _process_id(actor: Any) -> int:
    return os.getpid()

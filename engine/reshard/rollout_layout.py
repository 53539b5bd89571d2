"""What each vLLM rank needs, found by asking vLLM's own weight loaders; nothing here knows an architecture.

The model of one rank is built on the meta device, in this process, for any tensor-parallel size: it takes no memory and talks to nobody.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedConfig

from engine.reshard.checkpoint import described, skeleton
from engine.reshard.layout import Box, Layout, Tensor, volume
from engine.reshard.recording import Recorder, Wanted


def rollout_layout(config: PreTrainedConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype, parts: int, processes: Sequence[int]) -> Layout:
    """What the engines on `processes` need: one for each `parts` of them, rank `i % parts` of which sits on `processes[i]`.

    Raises:
        ValueError: vLLM cannot divide this model so, lacks one of the tensors, or has parameters that none of them fills.
    """
    ranks = [record(model, tensors) for model in rank_models(config, dtype, parts, torch.device("meta"))]
    return joint_layout(tensors, {process: ranks[position % parts] for position, process in enumerate(processes)}, config.model_type)


def joint_layout(tensors: Mapping[str, Tensor], wanted: Mapping[int, Wanted], model_type: str) -> Layout:
    """What all engines need, from what each process wants. ValueError where none has a place for a tensor."""
    types = {name: type_ for one in wanted.values() for name, type_ in one.types.items()}
    if excess := [name for name in tensors if name not in types]:
        raise ValueError(f"the rollout's {model_type} has no place for {', '.join(excess[:5])}; it computes with another model than the trainer's")
    boxes = {process: one.boxes() for process, one in wanted.items()}
    return Layout(tensors={name: Tensor(tensor.shape, types[name]) for name, tensor in tensors.items()}, boxes=boxes)


def rank_models(config: PreTrainedConfig, dtype: torch.dtype, parts: int, device: torch.device) -> Iterator[Any]:
    """vLLM's model of each of `parts` ranks, one at a time. While it is there, vLLM takes this process for that rank.

    Raises ValueError where vLLM cannot divide the model so.
    """
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    for rank in range(parts):
        with _as_rank(rank, parts):
            try:
                settings = _settings(config, dtype, parts)  # They remember the layers that were made with them.
                with set_default_torch_dtype(dtype), device:
                    model = initialize_model(settings)
            except (AssertionError, ValueError) as error:
                raise ValueError(f"vLLM cannot divide this model among {parts} ranks: {_said(error)}; choose another tensor-parallel size") from error
            yield model


def record(model: Any, tensors: Mapping[str, Tensor]) -> Wanted:
    """Runs the loaders of one rank's model. Parameters on the meta device stay there, others keep their values.

    Raises ValueError where a loader does more than cut, or a parameter is not filled to its last element.
    """
    with torch.device("meta"):
        sources = {name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)) for name, tensor in tensors.items()}
    parameters = dict(model.named_parameters())
    recorder = Recorder(sources, parameters)
    with recorder:
        model.load_weights(iter(sources.items()))
    _check_filled(recorder, parameters)
    return Wanted(recorder.copies, {copy.tensor: described(parameters[copy.parameter]).dtype for copy in recorder.copies})


def _check_filled(recorder: Recorder, parameters: Mapping[str, torch.Tensor]) -> None:
    written: dict[str, list[Box]] = {name: [] for name in parameters}
    for copy in recorder.copies:
        written[copy.parameter].append(copy.target)
    for name, boxes in written.items():
        empty = parameters[name].numel() - sum(volume(box) for box in boxes) - recorder.filled.get(name, 0)
        if empty:
            raise ValueError(f"vLLM's {name}: {empty} of its {parameters[name].numel()} elements come from no tensor of the checkpoint")


def _settings(config: PreTrainedConfig, dtype: torch.dtype, parts: int) -> Any:
    """vLLM's own settings for this model, from its configuration alone."""
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as directory:
        if not config.architectures:
            config.architectures = [type(skeleton(config, dtype)).__name__]
        config.save_pretrained(directory)
        arguments = EngineArgs(
            model=directory,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=str(dtype).removeprefix("torch."),
            tensor_parallel_size=parts,
            distributed_executor_backend="external_launcher",
            enforce_eager=True,
        )
        return arguments.create_engine_config()


def _said(error: Exception) -> str:
    """pydantic wraps vLLM's sentence in its own report."""
    _, wrapped, sentence = str(error).partition("Value error, ")
    return sentence.partition(" [type=")[0] if wrapped else str(error)


@contextmanager
def _as_rank(rank: int, parts: int) -> Iterator[None]:
    """Makes vLLM take this process for one of `parts`, with groups that nobody else is in; whatever groups there were come back."""
    from vllm.distributed import parallel_state

    group, alone = _group(rank, parts), _group(0, 1)
    seen = {"_WORLD": group, "_TP": group, "_EP": group} | dict.fromkeys(("_PP", "_DP", "_DCP", "_PCP"), alone)
    with ExitStack() as stack:
        for name, value in seen.items():
            stack.enter_context(mock.patch.object(parallel_state, name, value))
        yield


def _group(rank: int, size: int) -> Any:
    """A group as far as building a model asks of it: who and how many. Without channels, so that a collective would fail at once."""
    from vllm.distributed.parallel_state import GroupCoordinator

    group = object.__new__(GroupCoordinator)
    group.rank = group.rank_in_group = rank
    group.ranks, group.world_size, group.local_rank = list(range(size)), size, 0
    group.unique_name = f"layout:{rank}/{size}"
    group.cpu_group = group.device_group = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    group.device_communicator = group.mq_broadcaster = None
    group.use_custom_op_call = False
    return group

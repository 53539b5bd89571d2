"""A rollout backend in processes of its own, one a rank, and what a test asks of it there. No Ray."""

import os
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from engine.config import LoRAConfig, RolloutConfig

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
MAX_CONTEXT_TOKENS = 256
DEADLINE_SECONDS = 240


@dataclass(frozen=True)
class Drawn:
    """A response as the stream gave it."""

    position: int
    tokens: list[int]
    log_probs: list[float]
    finished: bool
    forwards: int
    """Passes of the model since the stream began."""


class InProcess:
    """As `Ranks`, for a backend that needs no process of its own."""

    def __init__(self, backend: str, model_directory: Path, config: RolloutConfig, lora: LoRAConfig | None = None) -> None:
        self._backend = start(backend, model_directory, config, lora)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [function(self._backend, *arguments)]


class Ranks:
    """The processes. `ask(function, ...)` calls `function(backend, ...)` on every rank, and returns what each says."""

    def __init__(self, backend: str, model_directory: Path, config: RolloutConfig, ranks: int = 1, lora: LoRAConfig | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
        context = get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, backend, model_directory, config, lora), daemon=True)
            with mock.patch.dict(os.environ, ENVIRONMENT | rendezvous | {"RANK": str(rank)}):
                process.start()
            self._pipes.append(here)
            self._processes.append(process)
            there.close()

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, arguments))
        return [self._answer(rank) for rank in range(len(self._pipes))]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _answer(self, rank: int) -> Any:
        assert self._pipes[rank].poll(DEADLINE_SECONDS), f"rank {rank} does not answer"
        failure, answer = self._pipes[rank].recv()
        assert failure is None, f"rank {rank}:\n{failure}"
        return answer


def _serve(pipe: Connection, backend: str, model_directory: Path, config: RolloutConfig, lora: LoRAConfig | None) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        started, failure = start(backend, model_directory, config, lora), None
    except Exception:  # noqa: BLE001  the test is told
        started, failure = None, traceback.format_exc()
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((failure, None if failure else function(started, *arguments)))
        except Exception:  # noqa: BLE001
            pipe.send((traceback.format_exc(), None))


def start(backend: str, model_directory: Path, config: RolloutConfig, lora: LoRAConfig | None) -> Any:
    import torch
    from transformers import AutoTokenizer

    from engine.rollout.registry import BACKENDS

    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    return BACKENDS.get(backend)(model_directory, config, torch.float32, torch.device("cpu"), MAX_CONTEXT_TOKENS, tokenizer, lora)


def draw(backend: Any, requests: Sequence[Any], responses: int | None = None) -> list[Drawn]:
    """The stream, in its order, closed after so many responses."""
    # What each backend calls once for every pass of the model.
    owner, name = (backend._llm.llm_engine, "step") if hasattr(backend, "_llm") else (backend, "_logits")
    stream, drawn = backend.stream(requests), []
    with mock.patch.object(owner, name, wraps=getattr(owner, name)) as forward:
        for position, response in stream:
            drawn.append(Drawn(position, response.tokens, response.log_probs, response.finished, forward.call_count))
            if len(drawn) == responses:
                break
        stream.close()
    return drawn


class Witness:
    """What a backend shows of its weights, compared at once."""

    def __init__(self, tensors: dict[str, Any], version: int) -> None:
        self.version, self.tensors, self.wrong, self.seen = version, tensors, list[str](), set[Any]()

    def landed(self, piece: Any, tensor: Any) -> None:
        self.seen.add(piece)
        if not tensor.equal(_box(self.tensors[piece.tensor], piece.box)):
            self.wrong.append(piece.tensor)

    def packed(self, parameter: str, apply: Callable[..., Any], weight: Any) -> None:
        from engine.reshard.proof import packed_differs

        if packed_differs(apply, weight, self.version):
            self.wrong.append(parameter)


def load(backend: Any, model_directory: Path, version: int = 1) -> list[str]:
    """Gives the backend the weights of a directory, every slice that it wants; names those that it then has otherwise."""
    from safetensors.torch import load_file

    from engine.reshard.checkpoint import described
    from engine.reshard.plan import Piece

    tensors = load_file(model_directory / "model.safetensors")
    wanted = backend.wants({name: described(tensor) for name, tensor in tensors.items()})
    pieces = [Piece(name, box) for name, boxes in wanted.boxes().items() for box in boxes]
    witness = Witness(tensors, version)
    backend.receive(((piece, _box(tensors[piece.tensor], piece.box)) for piece in pieces), witness)
    return witness.wrong + [piece.tensor for piece in pieces if piece not in witness.seen]


def _box(tensor: Any, box: Any) -> Any:
    return tensor[tuple(slice(*bounds) for bounds in box)]


def refusal(backend: Any, requests: Sequence[Any]) -> str:
    try:
        list(backend.stream(requests))
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def unfinished(backend: Any) -> int:
    return int(backend._llm.llm_engine.get_num_unfinished_requests())


def second_stream(backend: Any, requests: Sequence[Any]) -> str:
    first = backend.stream(requests)
    next(first)
    try:
        next(backend.stream(requests))
    except RuntimeError as error:
        return str(error)
    finally:
        first.close()
    return "nothing was refused"


def has_shared_memory(backend: Any) -> bool:
    """Whether vLLM's extension was built for it: for AVX-512, and for ARM. Elsewhere ranks reduce over gloo."""
    import torch

    return hasattr(torch.ops._C, "init_shm_manager")


def shared_memory(backend: Any) -> list[str]:
    """Files of vLLM's shared memory that this process has open; "(deleted)" behind the name of one that the next process cannot find."""
    return [line.split(maxsplit=5)[5].strip() for line in Path("/proc/self/maps").read_text().splitlines() if "cpushm" in line]

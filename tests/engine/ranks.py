"""Processes of a gloo group, without Ray: what a training backend needs, and nothing else."""

import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 240
"""After which ranks that have not answered are stopped."""


def run(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """`function(*arguments)` on each of `ranks` processes of one group; what they return, by rank. It must be a function of a module.

    Raises `RuntimeError` with the traceback of every rank that failed.
    """
    # The server imports what takes seconds once; every rank after that is a fork of it, with no thread of this process in it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.models.qwen3.modeling_qwen3", "engine.training.tensor_parallel"])
    with socket.socket() as found, tempfile.TemporaryDirectory() as results:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        processes = [context.Process(target=_rank, args=(function, arguments, rank, ranks, port, results)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
        stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for rank in stuck:
            processes[rank].kill()
            processes[rank].join()
        answers = [
            torch.load(path, weights_only=False) if (path := Path(results) / f"{rank}").exists() else (None, "no answer") for rank in range(ranks)
        ]
    if failed := [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]:
        raise RuntimeError("\n".join(failed))
    return [answer for answer, _ in answers]


def _rank(function: Callable[..., Any], arguments: tuple[Any, ...], rank: int, ranks: int, port: int, results: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        answer = function(*arguments)
    except BaseException:
        torch.save((None, traceback.format_exc()), Path(results) / f"{rank}")
        raise
    torch.save((answer, None), Path(results) / f"{rank}")

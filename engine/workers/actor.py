"""The hybrid actor: one rank that trains its shard of the policy and generates with the whole of it, on the same device."""

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import Enum
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from engine.algorithms.aggregation import Denominators, aggregate, count
from engine.algorithms.registry import LOSSES
from engine.algorithms.rollout_agreement import rollout_agreement
from engine.algorithms.types import LossInputs
from engine.batch import Batch, join
from engine.config import EngineConfig, LossConfig, OptimizerConfig
from engine.control.dispatch import Dispatch, register
from engine.export import save_checkpoint
from engine.metrics import Maximum, Mean, Statistics, Sum
from engine.rollout.backend import Request
from engine.training.backend import TokenScores
from engine.training.fsdp import FSDPBackend
from engine.training.micro_batches import micro_batches


class Phase(Enum):
    """What the actor may do now."""

    STALE = "the rollout engine does not have the trainer's weights"
    READY = "both engines hold the same weights"


class HybridActor:
    """One rank. Methods marked DATA_PARALLEL or ALL are collectives: the group calls them on every rank."""

    def __init__(self, config: EngineConfig, model_directory: Path, log_directory: Path, device: str, dtype: str, rank: int, world_size: int) -> None:
        _log_to(log_directory / f"rank_{rank}.log")
        self._config = config
        self._model_directory = model_directory
        self._device = torch.device(device)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._rank, self._world_size = rank, world_size
        self._phase = Phase.STALE
        self._weight_version = 0
        torch.set_num_threads(config.resources.cpus_per_rank)

    @register(Dispatch.ALL)
    def start(self, master_address: str, master_port: int) -> str:
        """Joins the ranks' process group and builds both engines. Returns the digest of the configuration that this rank was given."""
        from engine.rollout.vllm import VLLMBackend  # seconds of import and a gigabyte, which the controller can do without

        os.environ |= {
            "RANK": str(self._rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": master_address,
            "MASTER_PORT": str(master_port),
        }
        timeout = timedelta(seconds=self._config.resources.call_deadline_seconds)
        dist.init_process_group("cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo", timeout=timeout)
        mesh = init_device_mesh(self._device.type, (self._world_size,), mesh_dim_names=("fsdp",))
        self._tokenizer = AutoTokenizer.from_pretrained(self._model_directory)
        self._training = FSDPBackend(self._model_directory, mesh, self._dtype)
        stop_token = self._tokenizer.eos_token_id
        self._rollout = VLLMBackend(self._model_directory, self._config.rollout, self._dtype, self._config.max_context_tokens, stop_token)
        return self._config.digest()

    @register(Dispatch.ALL)
    def reset_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        """A fresh optimizer and schedule, as every stage begins with."""
        self._training.reset_optimizer(config, total_steps)

    @register(Dispatch.DATA_PARALLEL)
    def generate(self, requests: list[Request]) -> Batch:
        """One response for each request.

        Returns token tensors [B, T] (prompt, then response): input_ids, attention_mask, response_mask, rollout_log_probs; and the
        objects response (text), response_tokens, finished and weight_version.
        Raises `RuntimeError` when the rollout engine does not hold the trainer's weights.
        """
        if self._phase is not Phase.READY:
            raise RuntimeError(f"generate was called before synchronise: {self._phase.value}")
        responses = self._rollout.generate(requests)
        prompts = [len(request.prompt_tokens) for request in requests]
        rows = [torch.tensor([*request.prompt_tokens, *response.tokens]) for request, response in zip(requests, responses, strict=True)]
        log_probs = [torch.tensor([0.0] * length + response.log_probs) for length, response in zip(prompts, responses, strict=True)]
        input_ids = _padded(rows, torch.int64)
        position = torch.arange(input_ids.shape[1])
        attention_mask = position < torch.tensor([len(row) for row in rows]).unsqueeze(1)
        return Batch(
            tensors={
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "response_mask": attention_mask & (position >= torch.tensor(prompts).unsqueeze(1)),
                "rollout_log_probs": _padded(log_probs, torch.float32),
            },
            objects={
                "response": [self._tokenizer.decode(response.tokens, skip_special_tokens=True) for response in responses],
                "response_tokens": [len(response.tokens) for response in responses],
                "finished": [response.finished for response in responses],
                "weight_version": [self._weight_version] * len(responses),
            },
        )

    @register(Dispatch.DATA_PARALLEL)
    def log_prob(self, batch: Batch, temperature: float, max_tokens: int) -> Batch:
        """The trainer's log-probs of the response tokens, as the tensors old_log_probs and old_entropy [B, T]."""
        shape = batch.tensors["input_ids"].shape
        log_probs, entropy = torch.zeros(shape), torch.zeros(shape)
        numbered = batch.select(["input_ids", "attention_mask", "response_mask"]).with_tensors(row=torch.arange(shape[0]))
        with torch.no_grad():
            for part in micro_batches(numbered, max_tokens):
                scores = self._score(part, temperature)
                mask = part.tensors["response_mask"]
                row = part.tensors["row"].unsqueeze(1).expand(mask.shape)[mask]
                column = torch.arange(mask.shape[1]).expand(mask.shape)[mask]
                log_probs[row, column] = scores.log_probs.cpu()[mask]
                entropy[row, column] = scores.entropy.cpu()[mask]
        return Batch(tensors={"old_log_probs": log_probs, "old_entropy": entropy})

    @register(Dispatch.DATA_PARALLEL)
    def agreement(self, rollout: Batch, old: Batch) -> Statistics:
        """How far trainer and rollout are apart on the tokens that the rollout drew, and the policy's entropy."""
        mask = rollout.tensors["response_mask"]
        statistics = rollout_agreement(old.tensors["old_log_probs"], rollout.tensors["rollout_log_probs"], mask)
        statistics.add("policy/entropy", Mean(float(old.tensors["old_entropy"][mask].double().sum()), int(mask.sum())))
        return statistics

    @register(Dispatch.DATA_PARALLEL)
    def update(
        self, rollout: Batch, old: Batch, advantages: Batch, loss: LossConfig, updates: int, temperature: float, max_tokens: int
    ) -> Statistics:
        """`updates` optimizer steps, one for each contiguous part of this rank's rows. `advantages` [B, T] may have a longer T than these rows."""
        self._phase = Phase.STALE
        longest = rollout.tensors["input_ids"].shape[1]
        batch = join(
            rollout.select(["input_ids", "attention_mask", "response_mask", "rollout_log_probs"]),
            old.select(["old_log_probs"]),
            Batch(tensors={"advantages": advantages.tensors["advantages"][:, :longest]}),
        )
        statistics = Statistics()
        for mini_batch in batch.chunk(updates):
            denominators = self._denominators(mini_batch)
            term = partial(self._policy_loss, loss=loss, denominators=denominators, temperature=temperature, statistics=statistics)
            self._optimizer_step(mini_batch, max_tokens, term, statistics)
        # Every part of the loss carried the denominators of its own optimizer step.
        statistics.entries["policy/loss"] = Sum(statistics.result()["policy/loss"] / updates)
        return statistics

    @register(Dispatch.DATA_PARALLEL)
    def update_sft(self, batch: Batch, max_tokens: int) -> Statistics:
        """One optimizer step on the mean negative log-likelihood of the tokens in response_mask."""
        self._phase = Phase.STALE
        statistics = Statistics()
        term = partial(self._likelihood_loss, denominators=self._denominators(batch), statistics=statistics)
        self._optimizer_step(batch, max_tokens, term, statistics)
        return statistics

    @register(Dispatch.ALL)
    def synchronise(self) -> dict[str, float]:
        """Gives the rollout engine the trainer's weights, cast before they go over the wire, and counts up the weight version.

        Returns seconds and the bytes that this rank received.
        """
        started = time.perf_counter()
        self._phase = Phase.STALE
        received = 0

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal received
            for name, tensor in self._training.full_weights(self._dtype):
                received += tensor.numel() * tensor.element_size() * (self._world_size - 1) // self._world_size
                yield name, tensor

        self._rollout.load_weights(counted())
        self._weight_version += 1
        self._phase = Phase.READY
        return {"seconds": time.perf_counter() - started, "bytes_received": float(received), "version": float(self._weight_version)}

    @register(Dispatch.ALL)
    def export(self, directory: Path) -> None:
        """Writes the policy as an ordinary Hugging Face directory in float32, tokenizer included; rank 0 writes."""
        weights = self._training.full_weights(torch.float32)
        save_checkpoint(weights, self._training.config, self._tokenizer, directory, writes=self._rank == 0)

    @register(Dispatch.ALL)
    def peak_memory_gigabytes(self) -> float:
        """Largest resident memory of this process so far; on a GPU, of its device."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    def _denominators(self, batch: Batch) -> Denominators:
        """Tokens and sequences of one optimizer step over all ranks."""
        own = count(batch.tensors["response_mask"])
        total = torch.tensor([own.tokens, own.sequences])
        dist.all_reduce(total)
        return Denominators(tokens=int(total[0]), sequences=int(total[1]))

    def _score(self, batch: Batch, temperature: float) -> TokenScores:
        return self._training.score(batch.tensors["input_ids"].to(self._device), batch.tensors["response_mask"].to(self._device), temperature)

    def _optimizer_step(self, batch: Batch, max_tokens: int, term: Callable[[Batch], torch.Tensor], statistics: Statistics) -> None:
        done = self._training.optimizer_step(micro_batches(batch, max_tokens), term)
        statistics.add("policy/gradient_norm", Maximum(done.gradient_norm))
        statistics.add("policy/learning_rate", Maximum(done.learning_rate))
        statistics.add("policy/skipped_steps", Maximum(float(done.skipped)))

    def _policy_loss(self, batch: Batch, loss: LossConfig, denominators: Denominators, temperature: float, statistics: Statistics) -> torch.Tensor:
        mask = batch.tensors["response_mask"].to(self._device)
        inputs = LossInputs(
            log_probs=self._score(batch, temperature).log_probs,
            old_log_probs=batch.tensors["old_log_probs"].to(self._device),
            rollout_log_probs=batch.tensors["rollout_log_probs"].to(self._device),
            advantages=batch.tensors["advantages"].to(self._device),
            mask=mask,
        )
        terms = LOSSES.get(loss.name)(inputs, loss)
        value = aggregate(terms.per_token, mask, denominators, loss.aggregation, loss.aggregation_constant_tokens)
        statistics.update(terms.statistics)
        statistics.add("policy/loss", Sum(float(value.detach())))
        return value

    def _likelihood_loss(self, batch: Batch, denominators: Denominators, statistics: Statistics) -> torch.Tensor:
        mask = batch.tensors["response_mask"].to(self._device)
        value = aggregate(-self._score(batch, 1.0).log_probs, mask, denominators, "token_mean", None)
        statistics.add("sft/loss", Sum(float(value.detach())))
        return value


def _padded(rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """[B, T], padded on the right; a rank has no row where there are fewer requests than ranks."""
    return pad_sequence(rows, batch_first=True) if rows else torch.zeros((0, 0), dtype=dtype)


def _log_to(path: Path) -> None:
    """Sends everything that this process prints, libraries written in C included, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())

"""What every role shares, and what a role of one's own is built on."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.algorithms.aggregation import Denominators, count
from engine.batch import Batch
from engine.config import EngineConfig, LengthExtensionConfig, OptimizerConfig, RLStageConfig, SFTStageConfig
from engine.control.dispatch import ALL, DATA_PARALLEL, METRICS, register
from engine.control.mesh import Mesh
from engine.metrics import Maximum, Mean, Statistics, Sum
from engine.prompts import Prompt
from engine.reshard.layout import Sharding
from engine.rollout.plan import PromptSet
from engine.training.backend import Head, Measure, TrainingBackend
from engine.training.micro_batches import micro_batches
from engine.training.registry import BACKENDS

StageConfig = SFTStageConfig | RLStageConfig

TRAIN = "train"
"""The mesh over which a trained role divides its data."""


class Worker:
    """One rank of a role.

    Args:
        config: the engine's; its digest is confirmed to the controller.
        model_directory: the first weights and the tokenizer.
        device: `cpu` or `cuda`.
        dtype: name of the type that models compute in.
        rank, ranks: this process's place in its pool.
    """

    def __init__(self, config: EngineConfig, model_directory: Path, device: str, dtype: str, rank: int, ranks: int) -> None:
        self.config = config
        self.model_directory = model_directory
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.rank, self.ranks = rank, ranks
        self.prompt_sets: dict[str, PromptSet] = {}

    def meshes(self) -> Mapping[str, Mesh]:
        """Meshes that the methods of the class name in `register`, beside `data`."""
        return {}

    @register(ALL)
    def configuration(self) -> str:
        """Digest of the configuration that this rank was given."""
        return self.config.digest()

    @register(ALL)
    def load_prompts(self, name: str, prompts: Sequence[Prompt]) -> None:
        """Keeps prompts under a name: a rollout's meta `prompt_set` says which, and its column `prompt` where in it."""
        self.prompt_sets[name] = PromptSet(prompts)

    @register(ALL)
    def save_state(self, directory: Path) -> None:
        """Writes what this rank's next calls depend on, for `almanac replay`; nothing where they depend on their arguments alone."""

    @register(ALL)
    def load_state(self, directory: Path) -> None:
        """Takes what `save_state` wrote."""

    def prompts_of(self, rollout: Batch) -> list[Prompt]:
        """The prompt of each row of a rollout."""
        prompts = self.prompt_sets[rollout.meta["prompt_set"]].prompts
        return [prompts[position] for position in rollout.tensors["prompt"].tolist()]


class Annotator(Worker):
    """A role that looks at every rollout and adds columns to it. A new one is a subclass with a method `annotate`.

    Its constructor takes what `Worker` takes, and the `parameters` of its configuration as keywords.
    """

    def __init__(self, name: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.name = name

    def annotate(self, rollout: Batch) -> Batch:
        """Columns for these rows. `score` [B] is what `reward_weight` multiplies; the others reach estimators as `AdvantageInputs.columns`."""
        raise NotImplementedError(f"{type(self).__name__} has no method annotate(rollout)")

    @register(DATA_PARALLEL)
    def annotations(self, rollout: Batch) -> Batch:
        """The columns of `annotate`, as `NAME/COLUMN`. ValueError names the annotator whose columns do not fit the rollout."""
        columns = self._checked(self.annotate(rollout), rollout)
        return Batch(tensors={f"{self.name}/{column}": tensor for column, tensor in columns.items()})

    def _checked(self, found: Any, rollout: Batch) -> Mapping[str, torch.Tensor]:
        who, rows = f"annotators.{self.name}", len(rollout)
        if not isinstance(found, Batch):
            raise ValueError(f"{who}: annotate gave a {type(found).__name__}; it must give an engine.batch.Batch of tensors")
        if found.objects:
            raise ValueError(f"{who}: annotate gave the objects {', '.join(found.objects)}; columns of an annotator are tensors")
        for name, column in found.tensors.items():
            if len(column) != rows:
                raise ValueError(f"{who}: its column {name} has {len(column)} rows, and the rollout has {rows}")
            if column.dim() > 1 and column.shape[1] != rollout.width:
                widths = f"{column.shape[1]} tokens a row, and the rollout has {rollout.width}"
                raise ValueError(f"{who}: its column {name} has {widths}; give [B] or [B, T]")
        score = found.tensors.get("score")
        if score is None and self.config.annotators[self.name].reward_weight:
            raise ValueError(f"{who}: annotate gave no column score for reward_weight to multiply; give it, or set reward_weight=0")
        if score is not None and (score.dim() > 1 or not score.isfinite().all()):
            raise ValueError(f"{who}: its column score must be one finite number a row")
        return found.tensors


class TrainedWorker(Worker):
    """A role with a model on the training backend, whose rows are divided over the mesh `train`."""

    prefix: str
    """Of its metrics."""

    def __init__(self, config: EngineConfig, model_directory: Path, device: str, dtype: str, rank: int, ranks: int, head: Head = "policy") -> None:
        super().__init__(config, model_directory, device, dtype, rank, ranks)
        self._backend_class = BACKENDS.get(config.training.backend)
        self.training: TrainingBackend = self._backend_class(model_directory, head, config.training, self.dtype, self.device, self.sharding())

    def sharding(self) -> Sharding | None:
        """Called before the model is there: how its shards should lie; None leaves that to the backend."""
        return None

    def meshes(self) -> Mapping[str, Mesh]:
        """`train`, as the training backend divides its data."""
        return {TRAIN: self._backend_class.mesh(self.config.training, self.ranks)}

    @register(ALL)
    def save_state(self, directory: Path) -> None:
        """Weights and optimizer, this rank's shards."""
        directory.mkdir(parents=True, exist_ok=True)
        torch.save({"training": self.training.state(), "own": self.own_state()}, self._state_file(directory))

    @register(ALL)
    def load_state(self, directory: Path) -> None:
        """What `save_state` wrote. ValueError names the file where it is missing."""
        file = self._state_file(directory)
        if not file.is_file():
            raise ValueError(f"{file} does not exist: that step was kept without the state of this rank")
        state = torch.load(file, weights_only=False)
        self.training.load_state(state["training"])
        self.take_own_state(state["own"])

    @register(DATA_PARALLEL, mesh=TRAIN)
    def keep_batch(self, batch: Batch, directory: Path) -> list[str]:
        """Writes this rank's rows into the directory, as a dictionary of columns for `torch.load`. Returns the files."""
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / f"rank_{self.rank}.pt"
        torch.save({**batch.tensors, **batch.objects}, file)
        return [str(file)]

    def own_state(self) -> dict[str, Any]:
        """What the role's calls depend on beyond the training backend."""
        return {}

    def take_own_state(self, state: dict[str, Any]) -> None:
        """What `own_state` gave."""

    def start_optimizer(self, config: OptimizerConfig, total_steps: int) -> None:
        """A fresh optimizer, as every stage begins with."""
        self.training.reset_optimizer(config, total_steps)

    def passes(self, batch: Batch, max_tokens: int) -> list[Batch]:
        """Rows in forward passes of at most `max_tokens`; every rank makes as many. A collective."""
        return micro_batches(batch, max_tokens, padded=not self.config.training.pack_sequences, group=self.training.data_group)

    def over_rows(self, batch: Batch, max_tokens: int, compute: Callable[[Batch], Mapping[str, torch.Tensor]]) -> Batch:
        """Tensors [B, T] on the CPU, computed pass by pass without gradient, each in the row that it belongs to."""
        shape = batch.tensors["input_ids"].shape
        found: dict[str, torch.Tensor] = {}
        numbered = batch.select(["input_ids", "attention_mask", "response_mask"]).with_tensors(row=torch.arange(shape[0]))
        with torch.no_grad():
            for part in self.passes(numbered, max_tokens):
                mask, row = part.tensors["response_mask"], part.tensors["row"]
                for name, tensor in compute(part).items():
                    whole = found.setdefault(name, torch.zeros(shape))
                    # A part that only fills up has no response token, and must not overwrite the row that it claims.
                    rows = mask.any(dim=1)
                    whole[row[rows], : mask.shape[1]] = tensor.cpu().float()[rows]
        return Batch(tensors=found)

    @register(METRICS, mesh=TRAIN)
    def entropies(self, rollout: Batch, temperature: float, max_tokens: int, length_extension: LengthExtensionConfig | None) -> Statistics:
        """The policy's entropy on the response tokens, at a temperature (`policy/entropy`) and at 1 (`policy/entropy_temperature_1`).

        Not within a stage. A pass computes over `max_tokens` tokens at most.
        """
        self.training.extend(length_extension)
        measures: list[Measure] = ["entropy", "entropy_temperature_1"]

        def compute(part: Batch) -> dict[str, torch.Tensor]:
            return {str(name): found for name, found in self.training.score(part, temperature, measures).measures.items()}

        found, mask, statistics = self.over_rows(rollout, max_tokens, compute), rollout.tensors["response_mask"], Statistics()
        for name in measures:
            statistics.add(f"policy/{name}", Mean(float(found.tensors[name][mask].double().sum()), int(mask.sum())))
        return statistics

    def reference_log_probs(self, rollout: Batch, stage: RLStageConfig) -> Batch:
        """What this model says of the response tokens at the sampling temperature, as the tensor reference_log_probs [B, T]."""
        temperature, max_tokens = stage.sampling.temperature, stage.training.max_tokens_per_micro_batch
        return self.over_rows(rollout, max_tokens, lambda part: {"reference_log_probs": self.training.score(part, temperature).log_probs})

    def columns(self, batch: Batch, names: Sequence[str]) -> Batch:
        """What an update reads: the token columns and those named. The response mask is what there is to learn from (`step_advantages`)."""
        selected = batch.select(["input_ids", "attention_mask", "response_mask", *names])
        return selected.with_tensors(response_mask=batch.tensors.get("loss_mask", batch.tensors["response_mask"]))

    def denominators(self, batch: Batch) -> Denominators:
        """Tokens and sequences of one optimizer step over all ranks. A collective."""
        own = count(batch.tensors["response_mask"])
        total = torch.tensor([own.tokens, own.sequences])
        dist.all_reduce(total, group=self.training.data_group)
        return Denominators(tokens=int(total[0]), sequences=int(total[1]))

    def optimizer_step(self, batch: Batch, max_tokens: int, term: Callable[[Batch], torch.Tensor], statistics: Statistics) -> bool:
        """One update by the sum of `term` over all passes of all ranks; False where it was skipped. A collective."""
        done = self.training.optimizer_step(self.passes(batch, max_tokens), term)
        statistics.add(f"{self.prefix}/gradient_norm", Maximum(done.gradient_norm))
        statistics.add(f"{self.prefix}/learning_rate", Maximum(done.learning_rate))
        statistics.add(f"{self.prefix}/consecutive_skips", Maximum(float(done.consecutive_skips)))
        return done.consecutive_skips == 0

    def updates(self, columns: Batch, stage: RLStageConfig, share: Callable[..., torch.Tensor]) -> Statistics:
        """`updates_per_step` optimizer steps, one for each contiguous part of this rank's rows. A collective.

        `share(pass, denominators=, statistics=)` gives a pass's share of the loss of its optimizer step, and adds it to the statistics as
        `PREFIX/loss`. A mini-batch without any response token, on all ranks together, makes no step: `PREFIX/empty_updates`.
        """
        loss, skipped, empty = f"{self.prefix}/loss", 0, 0
        statistics = Statistics({loss: Sum(0.0)})
        for mini_batch in columns.chunk(stage.updates_per_step):
            denominators = self.denominators(mini_batch)
            if not denominators.tokens:
                # All ranks count alike. With a gradient of 0 the optimizer would still move by its momentum and decay the weights.
                empty += 1
                continue
            term = partial(share, denominators=denominators, statistics=statistics)
            skipped += not self.optimizer_step(mini_batch, stage.training.max_tokens_per_micro_batch, term, statistics)
        statistics.add(f"{self.prefix}/skipped_updates", Maximum(float(skipped)))  # All ranks skip the same ones.
        statistics.add(f"{self.prefix}/empty_updates", Maximum(float(empty)))
        # Every share of the loss carried the denominators of its own optimizer step.
        statistics.entries[loss] = Sum(statistics.result()[loss] / stage.updates_per_step)
        return statistics

    def _state_file(self, directory: Path) -> Path:
        return directory / f"{type(self).__name__}.{self.rank}.pt"

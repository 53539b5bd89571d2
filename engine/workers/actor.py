"""The hybrid actor: one rank that trains its shard of the policy and generates with the whole of it, on the same device."""

import resource
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer

from engine.algorithms import off_policy
from engine.algorithms.aggregation import Denominators, aggregate
from engine.algorithms.coefficients import Coefficients, Observed
from engine.algorithms.kl import kl
from engine.algorithms.policy_loss import policy_loss
from engine.algorithms.rollout_agreement import rollout_agreement
from engine.batch import Batch, join
from engine.config import LengthExtensionConfig, RLStageConfig
from engine.control.dispatch import ALL, DATA_PARALLEL, METRICS, register
from engine.control.mesh import Mesh
from engine.control.worker_group import Outlet
from engine.export import save_checkpoint
from engine.metrics import Maximum, Mean, Statistics, Sum
from engine.reshard.build import best_sharding
from engine.reshard.checkpoint import checkpoint_of
from engine.reshard.held import boxes_of, held_slices
from engine.reshard.layout import Layout, Sharding
from engine.reshard.ledger import Ledger
from engine.reshard.proof import ProofError
from engine.reshard.rollout_layout import joint_layout
from engine.reshard.synchronise import Synchroniser, gathered
from engine.rollout.backend import Request, Response, RolloutBackend
from engine.rollout.plan import SamplePlan
from engine.rollout.registry import BACKENDS
from engine.training.backend import Measure
from engine.training.lora import export_adapter
from engine.workers.base import TRAIN, StageConfig
from engine.workers.columns import conversations, greedy_columns, in_order, token_tensors
from engine.workers.reward import Finished
from engine.workers.step import StepWorker

ROLLOUT = "rollout"
"""The mesh over which the rollout engines divide their requests."""
SIXTEEN_BIT_TOLERANCE = 0.5
"""nats, in the probe: rounding alone gave up to 0.07 in bfloat16 (bench/reshard.py), a tensor in another's place gives several."""
SECONDS_BETWEEN_TELLINGS = 0.05
"""Finished samples are told to the rewards at most so often: each telling costs a fraction of a millisecond."""
PROBE_TOKENS = 8
"""Of a prompt and of the response to it, by which the base is compared."""


class Phase(Enum):
    """What the actor may do now."""

    STALE = "the rollout engine does not have the trainer's weights"
    READY = "both engines hold the same weights"


class HybridActor(StepWorker):
    """One rank. All but RANK_ZERO methods are collectives: the group calls them on every rank."""

    prefix = "policy"

    def __init__(self, max_context_tokens: int, **arguments: Any) -> None:
        self._max_context_tokens = max_context_tokens
        super().__init__(**arguments)
        self._synchroniser = self._plan_synchronisations()
        self._phase = Phase.STALE
        self._weight_version = 0
        self._finished: Outlet | None = None
        self._length_extension: LengthExtensionConfig | None = None

    def sharding(self) -> Sharding | None:
        """The rollout engine is made first, and asked what it needs: shards that lie inside of it need not travel."""
        self._tokenizer = AutoTokenizer.from_pretrained(self.model_directory)
        self._rollout_class = BACKENDS.get(self.config.rollout.backend)
        self._rollout: RolloutBackend = self._rollout_class(
            self.model_directory,
            self.config.rollout,
            self.dtype,
            self.device,
            self._max_context_tokens,
            self._tokenizer,
            self.config.training.lora,
        )
        if self.config.training.lora is not None:
            return None
        model = AutoConfig.from_pretrained(self.model_directory)
        self._checkpoint = checkpoint_of(model, self.dtype)
        wanted = self._rollout.wants(self._checkpoint.tensors)
        self._needs = joint_layout(self._checkpoint.tensors, gathered(wanted), model.model_type)
        shards = self.config.training.shard_ranks or self.ranks
        return best_sharding(self._checkpoint, self._needs, self.ranks, shards, self.config.rollout.tensor_parallel_ranks)

    def _plan_synchronisations(self) -> Synchroniser | None:
        if self.config.training.lora is not None:
            return None
        held = gathered(boxes_of(held_slices(self.training.parameters(), self._checkpoint)))
        training = Layout(self._checkpoint.tensors, held)
        rollout = self.config.rollout
        return Synchroniser(
            training,
            self._needs,
            int(rollout.bucket_megabytes * 10**6),
            rollout.max_proof_share,
            self.rank,
            self.device,
            changed_only=rollout.changed_only,
        )

    def meshes(self) -> Mapping[str, Mesh]:
        """`train` and `rollout`, as the two backends divide their data."""
        return {**super().meshes(), ROLLOUT: self._rollout_class.mesh(self.config.rollout, self.ranks)}

    @register(ALL)
    def begin_stage(self, config: StageConfig) -> None:
        """A fresh optimizer and schedule; the stage's settings hold for all calls until the next."""
        self._stage = config
        self.begin_memories()
        assert config.steps is not None, "a stage begins with its number of steps known"
        updates = config.updates_per_step if isinstance(config, RLStageConfig) else 1
        self.training.extend(config.length_extension if isinstance(config, RLStageConfig) else None)
        self.start_optimizer(config.training.optimizer, config.steps * updates)

    @register(ALL)
    def restart_optimizer(self, steps: int) -> None:
        """Within an RL stage: a fresh optimizer, with warm-up and schedule over the `steps` that are left."""
        self.start_optimizer(self._rl_stage.training.optimizer, steps * self._rl_stage.updates_per_step)

    @register(ALL)
    def load_rows(self, rows: Sequence[tuple[list[int], list[bool]]]) -> None:
        """Conversations for `update_sft`: token ids and which of them are to be learnt."""
        self._rows = rows

    @register(ALL)
    def tell_finished(self, outlet: Outlet) -> None:
        """Where to send each sample as soon as it is finished, as `Finished` says."""
        self._finished = outlet

    @register(DATA_PARALLEL, mesh=ROLLOUT)
    def generate(self, plan: SamplePlan) -> Batch:
        """The samples of a plan, in its order.

        Returns token tensors [B, T] (prompt, then response): input_ids, attention_mask, response_mask, rollout_log_probs; tensors [B]:
        prompt (position in the prompt set), sample (its number), response_tokens, finished, weight_version; the object response (text). With
        `greedy_baseline` of the plan also the greedy answer to each row's prompt: the object greedy_response, greedy_tokens and greedy_finished [B].
        Raises `RuntimeError` when the rollout engine does not hold the trainer's weights.
        """
        if self._phase is not Phase.READY or self._rollout.weight_version != self._weight_version:
            raise RuntimeError(f"generate was called before synchronise: {self._phase.value}")
        if plan.length_extension != self._length_extension:
            self._rollout.extend(plan.length_extension)
            self._length_extension = plan.length_extension
        requests, places = plan.requests(self.prompt_sets[plan.prompt_set], self._tokenizer), plan.places()
        # Of ranks that share an engine one speaks.
        outlet = self._finished if self.meshes()[ROLLOUT].speaks[self.rank] else None
        drawn: dict[int, Response] = {}
        texts: dict[int, str] = {}
        untold: dict[int, Finished] = {}
        told = time.monotonic()
        for position, response in self._rollout.stream(requests):
            drawn[position] = response
            texts[position] = self._tokenizer.decode(response.tokens, skip_special_tokens=True)
            if position < len(places):
                finished = (plan.prompt_set, places[position][0], texts[position], len(response.tokens), response.finished)
                untold[plan.first + position] = finished
            if outlet is not None and time.monotonic() - told >= SECONDS_BETWEEN_TELLINGS:
                outlet.tell(untold, plan.total)
                untold, told = {}, time.monotonic()
        responses = in_order(drawn, len(requests), self.config.rollout.backend)
        responses, greedy = responses[: len(places)], responses[len(places) :]
        tensors = token_tensors([list(request.prompt_tokens) for request in requests[: len(places)]], responses)
        columns = {
            "prompt": torch.tensor([position for position, _ in places], dtype=torch.int64),
            "sample": torch.tensor([number for _, number in places], dtype=torch.int64),
            "response_tokens": torch.tensor([len(response.tokens) for response in responses], dtype=torch.int64),
            "finished": torch.tensor([response.finished for response in responses], dtype=torch.bool),
            "weight_version": torch.full((len(responses),), self._rollout.weight_version, dtype=torch.int64),
        }
        rollout = Batch({**tensors, **columns}, {"response": [texts[row] for row in range(len(places))]}, {"prompt_set": plan.prompt_set})
        if not plan.greedy_baseline:
            return rollout
        answers = [texts[row] for row in range(len(places), len(requests))]
        return join(rollout, greedy_columns([position for position, _ in places], plan.baselines(), greedy, answers))

    @register(DATA_PARALLEL, mesh=TRAIN)
    def lengths(self, rollout: Batch) -> list[int]:
        """Tokens of each row, prompt and response."""
        return list(rollout.tensors["attention_mask"].sum(dim=1).tolist())

    @register(DATA_PARALLEL, mesh=TRAIN)
    def log_prob(self, rollout: Batch) -> Batch:
        """The trainer's log-probs of the response tokens, and their entropy, as the tensors old_log_probs and old_entropy [B, T].

        At another temperature than 1 also old_entropy_temperature_1 [B, T]; squared_probabilities [B, T] where the estimator reads them.
        """
        stage = self._rl_stage
        columns: dict[Measure, str] = {"entropy": "old_entropy"}
        if stage.sampling.temperature != 1:
            columns["entropy_temperature_1"] = "old_entropy_temperature_1"
        if stage.algorithm.advantage.needs_squared_probabilities:
            columns["squared_probabilities"] = "squared_probabilities"

        def compute(part: Batch) -> dict[str, torch.Tensor]:
            scores = self.training.score(part, stage.sampling.temperature, list(columns))
            return {"old_log_probs": scores.log_probs, **{columns[name]: found for name, found in scores.measures.items()}}

        return self.over_rows(rollout, stage.training.max_tokens_per_micro_batch, compute)

    @register(DATA_PARALLEL, mesh=TRAIN)
    def reference_log_prob(self, rollout: Batch) -> Batch:
        """With LoRA: log-probs of the base with the adapter off, as the tensor reference_log_probs [B, T]."""
        with self.training.without_adapter():
            return self.reference_log_probs(rollout, self._rl_stage)

    @register(METRICS, mesh=TRAIN)
    def agreement(self, batch: Batch) -> Statistics:
        """How far trainer and rollout are apart on the tokens just drawn, and the policy's entropy."""
        mask = batch.tensors["response_mask"]
        if "rescued" in batch.tensors:  # Drawn with older weights.
            mask = mask & ~batch.tensors["rescued"][:, None]
        statistics = rollout_agreement(batch.tensors["old_log_probs"], batch.tensors["rollout_log_probs"], mask)
        for name in ("entropy", "entropy_temperature_1"):
            if (column := batch.tensors.get(f"old_{name}")) is not None:
                statistics.add(f"policy/{name}", Mean(float(column[mask].double().sum()), int(mask.sum())))
        return statistics

    @register(METRICS, mesh=TRAIN)
    def update(self, batch: Batch) -> Statistics:
        """`updates_per_step` optimizer steps on the policy loss, one for each contiguous part of this rank's rows.

        Reads the rollout's token columns, old_log_probs, advantages, reference_log_probs where there is a KL penalty, old_entropy where there is a
        bonus, selected where the loss treats some tokens differently, and loss_mask where not all that was drawn is learnt from.
        """
        self._phase = Phase.STALE
        stage, correction = self._rl_stage, self._rl_stage.algorithm.off_policy
        names = ["rollout_log_probs", "old_log_probs", "advantages"]
        columns = self.columns(batch, [*names, *(name for name in ("reference_log_probs", "selected") if name in batch.tensors)])
        if correction is not None and correction.weights is not None:
            # Of all that was drawn: a response is as likely as its tokens together, those that are not learnt from included.
            old, rollout, mask = (batch.tensors[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
            columns = columns.with_tensors(off_policy_weights=off_policy.weights(old, rollout, mask, correction.weights))
        observed = self._observed(batch, columns.tensors["response_mask"])
        coefficients = self._coefficients.in_force(stage.algorithm, observed)
        statistics = self.updates(columns, stage, partial(self._policy_loss, coefficients=coefficients))
        for name, term in (("kl", stage.algorithm.kl), ("entropy", stage.algorithm.entropy)):
            if term is not None:
                statistics.add(f"policy/{name}_coefficient", Maximum(getattr(coefficients, name)))
        self._coefficients = self._coefficients.after(stage.algorithm, observed)
        return statistics

    @register(METRICS, mesh=TRAIN)
    def update_sft(self, chosen: list[int]) -> Statistics:
        """One optimizer step on the mean negative log-likelihood of what the chosen conversations have to teach."""
        self._phase = Phase.STALE
        batch, statistics = conversations([self._rows[row] for row in chosen]), Statistics()
        term = partial(self._likelihood_loss, denominators=self.denominators(batch), statistics=statistics)
        taken = self.optimizer_step(batch, self._stage.training.max_tokens_per_micro_batch, term, statistics)
        statistics.add("policy/skipped_updates", Maximum(float(not taken)))
        statistics.add("sft/tokens", Sum(float(batch.tensors["attention_mask"].sum())))
        return statistics

    @register(METRICS, mesh=TRAIN)
    def validate_sft(self, chosen: list[int]) -> Statistics:
        """Mean negative log-likelihood, over tokens, of what the chosen conversations would teach. Nothing is learnt."""
        batch, total = conversations([self._rows[row] for row in chosen]), 0.0
        with torch.no_grad():
            for part in self.passes(batch, self._stage.training.max_tokens_per_micro_batch):
                log_probs = self.training.score(part, 1.0).log_probs.cpu()
                total -= float(torch.where(part.tensors["response_mask"], log_probs, 0).double().sum())
        return Statistics({"sft/validation_loss": Mean(total, float(batch.tensors["response_mask"].sum()))})

    @register(ALL)
    def synchronise(self) -> dict[str, float]:
        """Gives the rollout engine the trainer's weights: each rank receives what it needs and does not hold, in the rollout's type.

        With LoRA it gives the adapter alone, to every rank: the base never changes, and the engine has read it from where the trainer has.

        Returns the ledger, the version, and the largest memory of this process so far (on a GPU, of its device). Raises `ProofError` where the
        engine does not have the trainer's weights; it generates nothing then.
        """
        self._phase = Phase.STALE
        self._weight_version += 1
        if self._synchroniser is None:
            ledger = self._synchronise_adapter()
        else:
            shards = held_slices(self.training.parameters(), self._checkpoint)
            ledger = self._synchroniser.run(shards, self._rollout, self._weight_version)
        self._phase = Phase.READY
        return ledger.metrics() | {"version": float(self._weight_version), "peak_gigabytes": self._peak_gigabytes()}

    @register(ALL)
    def probe(self) -> None:
        """Once, after the first synchronisation: do both engines mean the same by the same weights? They are asked about a greedy response.

        Checksums compare tensors by their names; this would show one that is loaded under another's, and with LoRA another base. ProofError where
        log-probs differ by more than `rollout.max_log_prob_difference`, which 16-bit types are not held to so narrowly.
        """
        bound = self.config.rollout.max_log_prob_difference
        if bound is not None and self.dtype.itemsize < torch.float32.itemsize:
            bound = max(bound, SIXTEEN_BIT_TOLERANCE)
        prompt = torch.randint(len(self._tokenizer), (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
        ((_, response),) = self._rollout.stream([Request(prompt, seed=0, sampling=None, max_tokens=PROBE_TOKENS)])
        probe = Batch(token_tensors([prompt], [response]))
        with torch.no_grad():
            scores = self.training.score(probe, temperature=1.0)
        found = rollout_agreement(scores.log_probs.cpu(), probe.tensors["rollout_log_probs"], probe.tensors["response_mask"]).result()
        if bound is not None and not found["policy/max_log_prob_difference"] <= bound:
            raise ProofError(
                f"log-probs of trainer and rollout.backend={self.config.rollout.backend} differ by {found['policy/max_log_prob_difference']:.3g} "
                f"(allowed: {bound:g}) after the first synchronisation: one of them does not compute with the weights of "
                f"{self.model_directory}, or in another dtype"
            )

    @register(ALL)
    def export(self, directory: Path) -> None:
        """Writes the policy as an ordinary Hugging Face directory in float32, adapters merged, tokenizer included; rank 0 writes."""
        weights = self.training.full_weights(torch.float32)
        save_checkpoint(weights, self.training.config, self._tokenizer, directory, writes=self.rank == 0)

    @register(ALL)
    def export_adapter(self, directory: Path) -> None:
        """Writes the adapter alone, in peft's format: `PeftModel.from_pretrained(base, directory)` loads it; rank 0 writes."""
        assert self.config.training.lora is not None, "there is no adapter without training.lora"
        weights = self.training.adapter_weights(torch.float32)
        if self.rank == 0:
            export_adapter(directory, weights, self.config.training.lora, str(self.model_directory))

    def own_state(self) -> dict[str, Any]:
        """The weight version, and what the stage remembers."""
        return {"weight_version": self._weight_version, **self.memories()}

    def take_own_state(self, state: dict[str, Any]) -> None:
        """The rollout engine waits for `synchronise`, which gives it these weights as the version that they were."""
        self._phase = Phase.STALE
        if self._synchroniser is not None:
            self._synchroniser.forget()
        self._weight_version = state["weight_version"] - 1
        self.take_memories(state)

    def _synchronise_adapter(self) -> Ledger:
        started = time.perf_counter()
        adapter = self.training.adapter_weights(self.dtype)
        gathered_at = time.perf_counter()
        self._rollout.load_adapter(adapter, self._weight_version)
        ended = time.perf_counter()
        others = sum(tensor.nbytes * (self.ranks - 1) // self.ranks for tensor in adapter.values())
        return Ledger(
            bytes_received=others,
            bytes_sent=others,
            bytes_minimum=others,
            peak_extra_bytes=sum(tensor.nbytes for tensor in adapter.values()),
            transfer_seconds=gathered_at - started,
            load_seconds=ended - gathered_at,
            proof_coverage=1.0,
            seconds=ended - started,
        )

    def _peak_gigabytes(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    def _observed(self, batch: Batch, mask: torch.Tensor) -> Observed:
        """Of the step's rows of all ranks. A collective."""
        columns, penalty = batch.tensors, self._rl_stage.algorithm.kl
        nothing = torch.zeros(mask.shape)
        distance = kl(penalty.estimator, columns["old_log_probs"], columns["reference_log_probs"], mask) if penalty else nothing
        entropy = torch.where(mask, columns["old_entropy"], 0) if self._rl_stage.algorithm.entropy else nothing
        sums = torch.stack([distance.double().sum(), entropy.double().sum(), mask.sum().double(), mask.any(dim=1).sum().double()])
        dist.all_reduce(sums, group=self.training.data_group)
        kl_total, entropy_total, tokens, samples = sums.tolist()
        return Observed(kl=kl_total / max(1, tokens), entropy=entropy_total / max(1, tokens), samples=int(samples))

    def _policy_loss(self, batch: Batch, denominators: Denominators, statistics: Statistics, coefficients: Coefficients) -> torch.Tensor:
        stage, columns = self._rl_stage, {name: tensor.to(self.device) for name, tensor in batch.tensors.items()}
        measures: list[Measure] = ["entropy"] if coefficients.entropy else []
        scores = self.training.score(batch, stage.sampling.temperature, measures)
        value, found = policy_loss(columns, scores.log_probs, scores.measures.get("entropy"), stage.algorithm, coefficients, denominators)
        statistics.update(found)
        return value

    def _likelihood_loss(self, batch: Batch, denominators: Denominators, statistics: Statistics) -> torch.Tensor:
        mask = batch.tensors["response_mask"].to(self.device)
        value = aggregate(-self.training.score(batch, 1.0).log_probs, mask, denominators, "token_mean", None)
        statistics.add("sft/loss", Sum(float(value.detach())))
        return value

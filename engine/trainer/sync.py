"""Reinforcement learning in lockstep: generate, score, update, synchronise, and again."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from engine.algorithms.selection import Visit
from engine.config import OptimizerConfig, RLStageConfig
from engine.control.future import BatchFuture, Joined, join
from engine.control.worker_group import WorkerGroup
from engine.events import Emit, PromptsScored, SamplesGenerated, StageFinished, StageStarted, StepFinished, StepTraced, WeightsSynchronised
from engine.metrics import Statistics, merge
from engine.prompts import Prompt, PromptSampler
from engine.reshard.ledger import Ledger
from engine.trainer.ends import CollapseError, End, ended, progress
from engine.trainer.generation import Drawn, Generation
from engine.trainer.replay import STATE, step_directory
from engine.trainer.samples import sample_rows
from engine.trainer.session import Session
from engine.trainer.skips import look_at_skips
from engine.trainer.timing import PhaseTimer
from engine.training.balance import balanced_order

SYNC_METRICS = [field.name for field in fields(Ledger)]
"""Largest over the ranks, of each synchronisation."""


class DisagreementError(RuntimeError):
    """Trainer and rollout give the same tokens different log-probs: one of them computes with other weights."""


@dataclass(frozen=True, slots=True)
class Update:
    """The updates of one trained role in a step."""

    prefix: str
    """Of its metrics."""
    group: WorkerGroup
    optimizer: OptimizerConfig
    batch: Joined

    def keep(self, directory: Path) -> None:
        """Writes the batch into a directory, to be looked at."""
        self.group.keep_batch(self.batch, directory).get()


@dataclass
class SyncTrainer:
    """One RL stage. `step` is the algorithm; everything else is bookkeeping."""

    session: Session
    stage: str
    config: RLStageConfig
    prompts: Sequence[Prompt]
    seed: int
    emit: Emit

    def run(self) -> None:
        """All steps of the stage, or fewer where `ends` says so. The policy starts as it is, with a fresh optimizer."""
        config, recorder, started = self.config, self.session.recorder, time.perf_counter()
        self.emit(StageStarted(stage=self.stage, kind="rl", steps=config.steps))
        key = "prompts_per_step" if config.prompts_per_generation == config.prompts_per_step else "groups.prompts_per_generation"
        sampler = PromptSampler(self.prompts, config.prompts_per_generation, self.seed, key)
        generation = Generation(self.session, self.stage, config, self.seed, sampler)
        self.session.load_prompts(self.stage, self.prompts)
        self.session.begin_stage(config)
        history: list[dict[str, float]] = []
        end: End | None = None
        while end is None:
            step = len(history) + 1
            self._reset_reference(step)
            recorder.begin(self.stage, step, self._keep(step))
            metrics, samples = self.step(step, generation)
            history.append(metrics)
            end = ended(history, config)
            self.emit(StepTraced(trace=recorder.finish()))
            self._show(step, samples, last=end is not None)
            self.emit(StepFinished(stage=self.stage, step=step, metrics=metrics | progress(history, config)))
        if end.by == "collapse":
            raise CollapseError(f"stage {self.stage} has collapsed, and was stopped after step {len(history)} of {config.steps}: {end.why}")
        seconds = time.perf_counter() - started
        self.emit(StageFinished(stage=self.stage, steps=len(history), seconds=seconds, ended_by=end.by, why=end.why))

    def step(self, step: int, generation: Generation) -> tuple[dict[str, float], Joined]:
        """One rollout batch, its updates and the synchronisation. Returns the step's metrics, and its samples where they lie.

        Where no group is left to train on, it ends with the rollout.
        """
        actor, critic, timer = self.session.actor, self.session.critic, PhaseTimer()

        with timer("generate"):
            drawn = generation.draw(step)
            samples = join(*drawn.columns)
            if drawn.empty:
                return self._without_update(step, samples, drawn, timer), samples
            drawn = drawn.ordered(self._balanced(actor.lengths(drawn.trained[0]).get()))
        rollout, *rewards = drawn.trained
        old = actor.log_prob(rollout)  # these run side by side
        reference = self._reference(rollout)
        values = [critic.values(rollout)] if critic is not None and self.config.algorithm.critic else []
        scored = join(rollout, *rewards, old, *reference, *values)
        advantages = actor.advantage(scored, step, drawn.group)
        measured, visits = [actor.measure(samples), actor.measure_trained(scored)], actor.visits(samples)

        with timer("log_prob"):
            agreed = self._agreed(step, actor.agreement(join(rollout, old)).get())
        with timer("reward"):
            measures = merge(statistics.get() for statistics in measured).result()
            self._tell_scores(step, visits)
        with timer("update"):
            updates = [Update("policy", actor, self.config.training.optimizer, join(rollout, old, *reference, advantages))]
            if critic is not None and self.config.algorithm.critic is not None:
                updates.append(Update("critic", critic, self.config.algorithm.critic.optimizer, join(rollout, *values, advantages)))
            updated = self._updated(step, updates)
        with timer("synchronise"):
            synchronised = actor.synchronise().get()

        self.emit(WeightsSynchronised.of(self.stage, step, synchronised))
        tokens = measures.pop("response/tokens_total")
        metrics = {
            **measures,
            **drawn.metrics,
            **agreed,
            **{name: value for metrics in updated for name, value in metrics.items()},
            **{f"sync/{name}": max(rank[name] for rank in synchronised) for name in SYNC_METRICS},
            "memory/peak_gb": max(rank["peak_gigabytes"] for rank in synchronised),
            "throughput/tokens_per_second": tokens / timer.elapsed(),
            **timer.metrics(),
        }
        return metrics, samples

    def _without_update(self, step: int, samples: Joined, drawn: Drawn, timer: PhaseTimer) -> dict[str, float]:
        """Metrics of a step that trains on nothing: the weights stay, and the rollout engine has them."""
        measures = self.session.actor.measure(samples).get().result()
        self._tell_scores(step, self.session.actor.visits(samples))
        tokens = measures.pop("response/tokens_total")
        return {**measures, **drawn.metrics, "data/skipped_updates": 1.0, "throughput/tokens_per_second": tokens / timer.elapsed(), **timer.metrics()}

    def _balanced(self, lengths: Sequence[int]) -> list[int]:
        """An order of the step's rows in which every rank computes over nearly as many tokens."""
        return balanced_order(lengths, self.session.actor.mesh("train").parts, self.config.updates_per_step)

    def _reference(self, rollout: BatchFuture) -> list[BatchFuture]:
        """The column `reference_log_probs`, where the algorithm measures the distance from the reference."""
        if self.config.algorithm.kl is None:
            return []
        if self.session.reference is None:
            return [self.session.actor.reference_log_prob(rollout)]
        return [self.session.reference.log_prob(rollout)]

    def _agreed(self, step: int, statistics: Statistics) -> dict[str, float]:
        """Metrics of the agreement between trainer and rollout. Raises `DisagreementError` beyond the configured bound."""
        metrics, bound = statistics.result(), self.session.config.rollout.max_log_prob_difference
        if bound is not None and not metrics["policy/max_log_prob_difference"] <= bound:
            raise DisagreementError(
                f"stage {self.stage}, step {step}: trainer and rollout log-probs differ by {metrics['policy/max_log_prob_difference']:.3g} "
                f"(rollout.max_log_prob_difference={bound:g}). The rollout engine does not compute with the trainer's weights, or in another dtype."
            )
        return metrics

    def _updated(self, step: int, updates: Sequence[Update]) -> list[dict[str, float]]:
        """Metrics of updates side by side. Raises `NonFiniteGradientError` where too many of them could not be taken."""
        futures = [update.group.update(update.batch) for update in updates]
        found: list[dict[str, float]] = [future.get().result() for future in futures]
        for update, metrics in zip(updates, found, strict=True):
            look_at_skips(metrics, update.prefix, update.optimizer, self.session.directory, self.stage, step, update.keep, self.emit)
        return found

    def _reset_reference(self, step: int) -> None:
        """Where it is due before this step."""
        kl = self.config.algorithm.kl
        if kl is None or kl.reset_reference_every_steps is None or step == 1 or (step - 1) % kl.reset_reference_every_steps:
            return
        self.session.reset_reference(self.config)
        if kl.reset_optimizer:
            self.session.actor.restart_optimizer(self.config.steps - step + 1).get()

    def _keep(self, step: int) -> Path | None:
        """Where this step's calls are kept, with the state that they begin with already there; None where they are not."""
        every = self.config.keep_calls_every_steps
        if every is None or not (step in (1, self.config.steps) or step % every == 0):
            return None
        directory = step_directory(self.session.directory, self.stage, step)
        for future in [group.save_state(directory / STATE) for group in self.session.groups]:
            future.get()
        return directory

    def _tell_scores(self, step: int, visits: BatchFuture) -> None:
        """What every prompt that was asked scored."""
        found: list[Visit] = visits.get()
        ids = [self.prompts[visit.position].id for visit in found]
        means, counts = [visit.outcome for visit in found], [visit.samples for visit in found]
        self.emit(PromptsScored(stage=self.stage, step=step, prompts=ids, outcomes=means, samples=counts))

    def _show(self, step: int, samples: Joined, *, last: bool) -> None:
        """Fetches the texts of some steps for people to read; the loop itself never sees them."""
        if step == 1 or last or step % self.config.samples_table_every_steps == 0:
            rows = sample_rows(f"{self.stage}/{step}", samples.get(), self.prompts)
            self.emit(SamplesGenerated(stage=self.stage, step=step, rows=rows))


def train_rl(session: Session, stage: str, config: RLStageConfig, prompts: Sequence[Prompt], seed: int, emit: Emit) -> None:
    """Runs one RL stage on the session's policy. Raises what workers and rewards raise; a stage that returns did its last step, or has converged.

    `CollapseError` where the policy has collapsed; the session then holds its weights as they are.
    """
    SyncTrainer(session, stage, config, prompts, seed, emit).run()

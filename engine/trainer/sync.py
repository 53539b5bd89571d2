"""Reinforcement learning in lockstep: generate, score, update, synchronise, and again."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.algorithms.groups import group_statistics
from engine.algorithms.registry import ADVANTAGES
from engine.algorithms.types import AdvantageInputs
from engine.batch import Batch
from engine.config import RLStageConfig
from engine.events import Emit, SamplesGenerated, StageFinished, StageStarted, StepFinished, WeightsSynchronised
from engine.metrics import Statistics
from engine.prompts import Prompt, PromptSampler, sample_seed
from engine.rewards.scoring import score
from engine.trainer.samples import sample_requests, sample_rows
from engine.trainer.session import Session
from engine.trainer.timing import PhaseTimer


class DisagreementError(RuntimeError):
    """Trainer and rollout give the same tokens different log-probs: one of them computes with other weights."""


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
        """All steps of the stage. The policy starts as it is, with a fresh optimizer."""
        config, started = self.config, time.perf_counter()
        self.emit(StageStarted(stage=self.stage, kind="rl", steps=config.steps))
        sampler = PromptSampler(self.prompts, config.prompts_per_step, self.seed)
        self.session.actor.reset_optimizer(config.training.optimizer, config.steps * config.updates_per_step).get()
        for step in range(1, config.steps + 1):
            self.emit(StepFinished(stage=self.stage, step=step, metrics=self.step(step, sampler.step(step))))
        self.emit(StageFinished(stage=self.stage, steps=config.steps, seconds=time.perf_counter() - started))

    def step(self, step: int, prompts: Sequence[Prompt]) -> dict[str, float]:
        """One rollout batch, its updates and the synchronisation. Returns the step's metrics."""
        config, actor, timer = self.config, self.session.actor, PhaseTimer()
        temperature, max_tokens = config.sampling.temperature, config.training.max_tokens_per_micro_batch
        repeated = [prompt for prompt in prompts for _ in range(config.samples_per_prompt)]
        seeds = [sample_seed(self.seed, self.stage, step, prompt.id, index % config.samples_per_prompt) for index, prompt in enumerate(repeated)]
        requests = sample_requests(self.session.tokenizer, repeated, seeds, [config.sampling] * len(repeated), config.max_response_tokens)
        estimate = ADVANTAGES.get(config.algorithm.advantage.estimator)

        with timer("generate"):
            rollout = actor.generate(requests)
            samples = rollout.get()
        old = actor.log_prob(rollout, temperature, max_tokens)
        agreement = actor.agreement(rollout, old)
        with timer("reward"):  # while the trainer computes old log-probs
            rewards = torch.tensor(score(config.reward, samples.objects["response"], repeated, seed=(self.seed, step)))
        with timer("log_prob"):
            agreed = self._agreed(step, agreement.get())
        scored = self._advantage_inputs(samples, rewards)
        advantages = Batch(tensors={"advantages": estimate(scored, config.algorithm.advantage)})
        with timer("update"):
            updated = actor.update(rollout, old, advantages, config.algorithm.loss, config.updates_per_step, temperature, max_tokens).get()
        with timer("synchronise"):
            synchronised = actor.synchronise().get()

        self._report(step, repeated, samples, rewards, synchronised)
        tokens = sum(samples.objects["response_tokens"])
        return {
            **self._sample_metrics(samples, scored),
            **agreed,
            **updated.result(),
            "sync/bytes_received": max(rank["bytes_received"] for rank in synchronised),
            "memory/peak_gb": max(actor.peak_memory_gigabytes().get()),
            "throughput/tokens_per_second": tokens / timer.elapsed(),
            **timer.metrics(),
        }

    def _agreed(self, step: int, statistics: Statistics) -> dict[str, float]:
        """Metrics of the agreement between trainer and rollout. Raises `DisagreementError` beyond the configured bound."""
        metrics, bound = statistics.result(), self.session.config.rollout.max_log_prob_difference
        if bound is not None and not metrics["policy/max_log_prob_difference"] <= bound:
            raise DisagreementError(
                f"stage {self.stage}, step {step}: trainer and rollout log-probs differ by {metrics['policy/max_log_prob_difference']:.3g} "
                f"(rollout.max_log_prob_difference={bound:g}). The rollout engine does not compute with the trainer's weights, or in another dtype."
            )
        return metrics

    def _advantage_inputs(self, samples: Batch, rewards: torch.Tensor) -> AdvantageInputs:
        """The whole step's samples by group."""
        group = torch.arange(len(samples)) // self.config.samples_per_prompt
        return AdvantageInputs(rewards=rewards, group=group, mask=samples.tensors["response_mask"])

    def _sample_metrics(self, samples: Batch, scored: AdvantageInputs) -> dict[str, float]:
        lengths = torch.tensor(samples.objects["response_tokens"], dtype=torch.float32)
        return {
            "reward/mean": scored.rewards.mean().item(),
            "reward/std": scored.rewards.std().item(),
            "response/tokens_mean": lengths.mean().item(),
            "response/tokens_max": lengths.max().item(),
            "response/truncated_fraction": 1 - sum(samples.objects["finished"]) / len(samples),
            **group_statistics(scored.rewards, scored.group, scored.valid).result(),
        }

    def _report(self, step: int, repeated: Sequence[Prompt], samples: Batch, rewards: torch.Tensor, synchronised: list[dict[str, float]]) -> None:
        self.emit(
            WeightsSynchronised(
                stage=self.stage,
                step=step,
                version=int(synchronised[0]["version"]),
                seconds=max(rank["seconds"] for rank in synchronised),
                bytes_received=int(max(rank["bytes_received"] for rank in synchronised)),
            )
        )
        if step in (1, self.config.steps) or step % self.config.samples_table_every_steps == 0:
            ids = [f"{self.stage}/{step}/{prompt.id}/{index % self.config.samples_per_prompt}" for index, prompt in enumerate(repeated)]
            self.emit(SamplesGenerated(stage=self.stage, step=step, rows=sample_rows(ids, repeated, samples, rewards.tolist())))


def train_rl(session: Session, stage: str, config: RLStageConfig, prompts: Sequence[Prompt], seed: int, emit: Emit) -> None:
    """Runs one RL stage on the session's policy. Raises what workers and rewards raise; a stage that returns did its last step."""
    SyncTrainer(session, stage, config, prompts, seed, emit).run()

"""Training on two ranks in many ragged micro-batches is training on one device with the whole batch.

The reference is written down here once more, with nothing of the engine's: plain torch, plain transformers, the formulas of the papers.
"""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from probe import weights
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.batch import Batch
from engine.config import AlgorithmConfig, LossConfig, OptimizerConfig, PPOLossConfig, RLStageConfig, SamplingConfig, StageTrainingConfig
from engine.trainer.session import Session

MAX_TOKENS = 40
"""Two to four rows of the batch below in one pass."""
LENGTHS = [5, 19, 7, 40, 12, 9, 33, 6, 15, 11, 26]
"""Rank 0 has 6 rows, rank 1 has 5, of unequal lengths: they need different numbers of passes. One row fills a pass alone."""
TEMPERATURE = 0.7


def batch(seed: int) -> Batch:
    """Random tokens; responses of every length from none to nearly all."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS).unsqueeze(1)
    position = torch.arange(max(LENGTHS))
    attention = position < lengths
    prompts = 1 + (torch.rand(len(LENGTHS), 1, generator=generator) * (lengths - 1)).long()
    prompts[2] = LENGTHS[2]  # A row without any response token.
    ids = torch.randint(7, 100, attention.shape, generator=generator) * attention
    return Batch(tensors={"input_ids": ids, "attention_mask": attention, "response_mask": attention & (position >= prompts)})


def begin(
    session: Session, config: OptimizerConfig, steps: int, updates: int = 1, temperature: float = TEMPERATURE, loss: LossConfig | None = None
) -> None:
    """A stage with these settings; its size does not matter to the calls below."""
    stage = RLStageConfig(
        kind="rl",
        steps=steps,
        prompts_per_step=2,
        updates_per_step=updates,
        max_prompt_tokens=32,
        max_response_tokens=32,
        sampling=SamplingConfig(temperature=temperature),
        algorithm=AlgorithmConfig(loss=loss or PPOLossConfig()),
        training=StageTrainingConfig(optimizer=config, max_tokens_per_micro_batch=MAX_TOKENS),
    )
    session.actor.begin_stage(stage).get()


def update_sft(session: Session, rows: Batch) -> dict[str, float]:
    """One SFT step on these rows."""
    lengths = rows.tensors["attention_mask"].sum(dim=1).tolist()
    columns = zip(rows.tensors["input_ids"].tolist(), rows.tensors["response_mask"].tolist(), lengths, strict=True)
    session.actor.load_rows([(ids[:length], mask[:length]) for ids, mask, length in columns]).get()
    return session.actor.update_sft(list(range(len(rows)))).get().result()


# Adam divides by the gradient's size. With the usual epsilon a gradient that is twice too large would not show, and rounding errors of a
# gradient that is nearly 0 would be blown up to whole steps.
# Both kinds of clipping: none, so that scale shows in the weights; and always, so that a norm of one rank's shard would.
OPTIMIZERS = [
    OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-2, warmup_steps=2, max_gradient_norm=1e9),
    OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-2, warmup_steps=2, max_gradient_norm=0.1, schedule="cosine"),
]
optimizers = pytest.mark.parametrize("config", OPTIMIZERS, ids=["no clipping", "clipping"])


class Reference:
    """One optimizer on a whole model."""

    def __init__(self, directory: Path, config: OptimizerConfig, total_steps: int) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.start = self.weights()
        self.config, self.total_steps = config, total_steps
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(config.beta1, config.beta2), eps=config.epsilon, weight_decay=config.weight_decay
        )
        self.steps = 0

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def log_probs(self, rows: Batch, temperature: float) -> torch.Tensor:
        """[B, T]; 0 outside the response. All rows in one padded pass, with an attention mask."""
        ids = rows.tensors["input_ids"]
        logits = self.model(input_ids=ids, attention_mask=rows.tensors["attention_mask"].long()).logits[:, :-1] / temperature
        per_token = -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        return F.pad(per_token, (1, 0)) * rows.tensors["response_mask"]

    def step(self, loss: torch.Tensor) -> float:
        """Gradient norm before clipping."""
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_gradient_norm)
        warm, done = self.config.warmup_steps, self.steps
        if done < warm:
            factor = (done + 1) / warm
        elif self.config.schedule == "cosine":
            factor = 0.5 + 0.5 * math.cos(math.pi * (done - warm) / (self.total_steps - warm))
        else:
            factor = 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * factor
        self.optimizer.step()
        self.steps += 1
        return float(norm)


def assert_same(found: dict[str, torch.Tensor], reference: Reference) -> None:
    expected = reference.weights()
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        error = (found[name] - tensor).abs().max()
        assert error <= 1e-6 * tensor.abs().max(), name
        # Weights that hardly moved would pass the line above whatever moved them.
        assert error <= 1e-3 * (tensor - reference.start[name]).abs().max(), name


# Mutations: gradients not multiplied by the number of ranks; denominators of a micro-batch or of one rank instead of the step's;
# clipping by one shard's norm; the gradient sync never turned on again after the first micro-batch; a warm-up that begins at 0.
@optimizers
def test_sft(session: Session, tmp_path: Path, config: OptimizerConfig) -> None:
    reference = Reference(session.export(tmp_path / "model"), config, total_steps=3)
    begin(session, config, 3)
    for seed in range(3):
        rows = batch(seed)
        tokens = rows.tensors["response_mask"].sum()
        loss = -reference.log_probs(rows, 1.0).sum() / tokens
        norm = reference.step(loss)
        metrics = update_sft(session, rows)
        assert metrics["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["policy/gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert_same(weights(session), reference)


def token_mean(terms: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return terms.sum() / mask.sum()


def sequence_mean_token_mean(terms: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    lengths = mask.sum(dim=1)
    return (terms.sum(dim=1)[lengths > 0] / lengths[lengths > 0]).mean()


# Mutations as above, and: old log-probs of another row after the sorting by length; temperature left out of `update`;
# mini-batches that are not the contiguous parts of each rank's rows; advantages cut at the front.
@optimizers
@pytest.mark.parametrize("aggregation", [token_mean, sequence_mean_token_mean])
def test_policy_update(
    session: Session, tmp_path: Path, config: OptimizerConfig, aggregation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    reference = Reference(session.export(tmp_path / "model"), config, total_steps=2)
    rows = batch(7)
    mask = rows.tensors["response_mask"]
    advantages = torch.randn(mask.shape, generator=torch.Generator().manual_seed(8)) * mask
    rollout = rows.with_tensors(rollout_log_probs=torch.zeros(mask.shape))
    loss = PPOLossConfig(clip_low=0.1, clip_high=0.2, dual_clip=None, aggregation=aggregation.__name__)  # type: ignore[arg-type]

    with torch.no_grad():
        old = reference.log_probs(rows, TEMPERATURE)
    losses = []
    for mini_batch in ([0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10]):  # Rows 0-5 are rank 0's, 6-10 rank 1's; the first half of each, then the second.
        own = rows.rows(torch.tensor(mini_batch))
        ratio = (reference.log_probs(own, TEMPERATURE) - old[mini_batch]).exp()
        advantage = advantages[mini_batch]
        terms = -torch.minimum(advantage * ratio, advantage * ratio.clip(0.9, 1.2)) * mask[mini_batch]
        losses.append(aggregation(terms, mask[mini_batch]))
        reference.step(losses[-1])

    # One step of two updates.
    begin(session, config, 1, updates=2, loss=loss)
    old_log_probs = session.actor.log_prob(rollout).get()
    columns = rollout.with_tensors(advantages=advantages, **old_log_probs.tensors)
    metrics = session.actor.update(columns).get().result()
    assert metrics["policy/loss"] == pytest.approx(sum(value.item() for value in losses) / 2, abs=1e-5)
    assert_same(weights(session), reference)
    # The second mini-batch's ratios are no longer 1, else all of this would be policy gradient without clipping.
    assert metrics["policy/clip_fraction_low"] + metrics["policy/clip_fraction_high"] > 0


def test_log_probs_come_back_in_their_rows(session: Session, tmp_path: Path) -> None:
    # Mutation: results in the order of the micro-batches, which are sorted by length.
    reference = Reference(session.export(tmp_path / "model"), OPTIMIZERS[0], 1)
    rows = batch(11)
    begin(session, OPTIMIZERS[0], 1)
    scored = session.actor.log_prob(rows).get()
    with torch.no_grad():
        expected = reference.log_probs(rows, TEMPERATURE)
        logits = reference.model(input_ids=rows.tensors["input_ids"]).logits[:, :-1] / TEMPERATURE
        entropy = F.pad(torch.distributions.Categorical(logits=logits).entropy(), (1, 0)) * rows.tensors["response_mask"]
    torch.testing.assert_close(scored.tensors["old_log_probs"], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(scored.tensors["old_entropy"], entropy, atol=1e-5, rtol=0)


def test_fewer_rows_than_ranks(session: Session, tmp_path: Path) -> None:
    # Mutation: fill up with copies of a rank's own rows, which it may not have.
    config = OPTIMIZERS[0]
    reference = Reference(session.export(tmp_path / "model"), config, total_steps=1)
    rows = batch(13).rows(slice(3, 4))
    reference.step(-reference.log_probs(rows, 1.0).sum() / rows.tensors["response_mask"].sum())
    begin(session, config, 1)
    update_sft(session, rows)
    assert_same(weights(session), reference)


def test_a_gradient_that_is_not_finite_is_not_taken(session: Session) -> None:
    begin(session, OptimizerConfig(learning_rate=1e-2, max_consecutive_skips=3), 9, temperature=1.0)
    rows = batch(14)
    mask = rows.tensors["response_mask"]
    rollout = rows.with_tensors(rollout_log_probs=torch.zeros(mask.shape))
    old = session.actor.log_prob(rollout).get()

    def update(advantage: float) -> dict[str, float]:
        advantages = torch.ones(mask.shape)
        advantages[-1] = advantage  # In a row of rank 1: rank 0 must skip as well.
        return session.actor.update(rollout.with_tensors(advantages=advantages, **old.tensors)).get().result()

    start = weights(session)
    # Mutations: step in spite of the norm; decide by each rank's own gradients; count skips that are not in a row.
    for in_a_row in (1, 2):
        skipped = update(math.nan)
        assert (skipped["policy/skipped_updates"], skipped["policy/consecutive_skips"]) == (1, in_a_row)
    assert all(torch.equal(start[name], tensor) for name, tensor in weights(session).items())
    taken = update(1.0)
    assert (taken["policy/skipped_updates"], taken["policy/consecutive_skips"]) == (0, 0)
    assert not all(torch.equal(start[name], tensor) for name, tensor in weights(session).items())
    assert update(math.nan)["policy/consecutive_skips"] == 1

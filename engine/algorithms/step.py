"""From the columns of a whole step to its advantages, and to what people are told of its samples."""

from engine.algorithms.groups import group_statistics
from engine.algorithms.kl import kl
from engine.algorithms.registry import ADVANTAGES
from engine.algorithms.types import AdvantageInputs
from engine.batch import Batch
from engine.config import AlgorithmConfig
from engine.metrics import Maximum, Mean, StandardDeviation, Statistics, Sum


def step_advantages(batch: Batch, config: AlgorithmConfig) -> Batch:
    """Advantages, and returns where a critic is trained on them.

    Args:
        batch: response_mask [B, T], prompt [B], reward [B]; values, old_log_probs, reference_log_probs [B, T] where the algorithm reads
            them. Columns of annotators (`NAME/COLUMN`) reach the estimator.

    Returns:
        Tensors advantages and, it may be, returns [B, T].
    """
    columns = batch.tensors
    token_rewards = None
    if config.kl is not None and config.kl.place == "reward":
        distance = kl(config.kl.estimator, columns["old_log_probs"], columns["reference_log_probs"], columns["response_mask"])
        token_rewards = -config.kl.coefficient * distance
    inputs = AdvantageInputs(
        rewards=columns["reward"],
        group=columns["prompt"],
        mask=columns["response_mask"],
        token_rewards=token_rewards,
        values=columns.get("values"),
        columns={name: column for name, column in columns.items() if "/" in name},
    )
    found = ADVANTAGES.get(config.advantage.estimator)(inputs, config.advantage)
    return Batch(tensors={"advantages": found.advantages} | ({} if found.returns is None else {"returns": found.returns}))


def measure(batch: Batch) -> Statistics:
    """What a step's samples were like: rewards, lengths, groups without signal, and the mean score of every annotator.

    Args:
        batch: response_mask [B, T]; prompt, reward, response_tokens, finished [B].
    """
    columns, statistics = batch.tensors, Statistics()
    rewards, lengths, finished = columns["reward"], columns["response_tokens"], columns["finished"]
    statistics.add("reward/mean", Mean.of(rewards.tolist()))
    statistics.add("reward/std", StandardDeviation.of(rewards.tolist()))
    statistics.add("response/tokens_mean", Mean.of(lengths.tolist()))
    statistics.add("response/tokens_max", Maximum(float(lengths.max())))
    statistics.add("response/tokens_total", Sum(float(lengths.sum())))
    statistics.add("response/truncated_fraction", Mean.of((~finished).double().tolist()))
    statistics.update(group_statistics(rewards, columns["prompt"], columns["response_mask"].any(dim=1)))
    for name, column in columns.items():
        if name.endswith("/score") and column.dim() == 1:
            statistics.add(f"reward/{name.removesuffix('/score')}_mean", Mean(float(column.double().sum()), len(column)))
    if {"old_log_probs", "reference_log_probs"} <= set(columns):
        distance = kl("k3", columns["old_log_probs"], columns["reference_log_probs"], columns["response_mask"])
        statistics.add("policy/kl_from_reference", Mean(float(distance.double().sum()), float(columns["response_mask"].sum())))
    return statistics

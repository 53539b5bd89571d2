"""From the columns of a whole step to its advantages, to the terms of its loss, and to what people are told of its samples.

Estimators and losses may be somebody's own: what they give is looked at here, before it becomes a gradient.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.algorithms import off_policy
from engine.algorithms.covariance import covariances
from engine.algorithms.groups import group_statistics
from engine.algorithms.kl import kl
from engine.algorithms.registry import ADVANTAGES, LOSSES, SELECTIONS
from engine.algorithms.reward_statistics import reward_statistics
from engine.algorithms.types import AdvantageInputs, Advantages, LossInputs, LossTerms
from engine.batch import Batch
from engine.config import AlgorithmConfig, LossConfig
from engine.metrics import Maximum, Mean, StandardDeviation, Statistics, Sum


def step_advantages(
    batch: Batch,
    config: AlgorithmConfig,
    parts: int = 1,
    updates: int = 1,
    seed: tuple[int, ...] = (0,),
    kl_coefficient: float | None = None,
) -> Batch:
    """Advantages; returns where a critic is trained on them; and which tokens a loss treats differently, if it does.

    Args:
        batch: response_mask [B, T], prompt [B], reward [B]; group [B] where a prompt has several groups; values, old_log_probs,
            reference_log_probs, squared_probabilities [B, T], greedy_reward [B] and sample [B] where the algorithm reads them. Columns of
            annotators (`NAME/COLUMN`) reach the estimator. A column kept [B] bool, where there is one, says which samples are to be learnt from.
        config: the algorithm.
        parts: data-parallel parts that the rows are cut into for the updates.
        updates: optimizer steps that each part is cut into.
        seed: of the selection of tokens, by (run seed, step).
        kl_coefficient: of the KL penalty in the reward, as it is in this step; None stands for the configured one.

    Returns:
        Tensors advantages and, it may be, returns [B, T]; 0 outside the mask. Where samples or tokens can be taken out, loss_mask [B, T] bool,
        which then stands for the response mask in every loss and its denominators; estimators see it as their mask. For losses in `SELECTIONS`,
        selected [B, T] bool.

    Raises:
        ValueError: the estimator gave something else, or numbers that are not finite; names the estimator.
    """
    columns = batch.tensors
    mask = _learnt(columns, config)
    inputs = AdvantageInputs(
        rewards=columns["reward"],
        group=columns.get("group", columns["prompt"]),
        mask=mask,
        token_rewards=_penalties(columns, mask, config, kl_coefficient),
        values=columns.get("values"),
        greedy_rewards=columns.get("greedy_reward"),
        old_log_probs=columns.get("old_log_probs"),
        squared_probabilities=columns.get("squared_probabilities"),
        mini_batch=_mini_batches(len(batch), parts, updates),
        columns={name: column for name, column in columns.items() if "/" in name},
    )
    found, who = ADVANTAGES.get(config.advantage.estimator)(inputs, config.advantage), f"algorithm.advantage.estimator={config.advantage.estimator}"
    if not isinstance(found, Advantages):
        raise ValueError(f"{who} gave a {type(found).__name__}; it must give engine.algorithms.types.Advantages")
    if config.critic is not None and found.returns is None:
        raise ValueError(f"{who} gave no returns, and a critic is trained on them; give them, or leave algorithm.critic out")
    given = {"advantages": found.advantages} | ({} if found.returns is None else {"returns": found.returns})
    for name, values in given.items():
        _check(values, inputs.mask, f"{who}: {name}")
        if not values[inputs.mask].isfinite().all():
            row = int((inputs.mask & ~values.isfinite()).any(dim=1).nonzero()[0])
            raise ValueError(f"{who}: {name} of row {row} are not finite on response tokens; its reward is {inputs.rewards[row]:g}")
    made = {name: torch.where(inputs.mask, values, 0) for name, values in given.items()}
    if mask is not columns["response_mask"]:
        made["loss_mask"] = mask
    if config.loss.name in SELECTIONS.names():
        made["selected"] = _selected(columns, mask, made["advantages"], config.loss, seed)
    return Batch(tensors=made)


def _penalties(columns: Mapping[str, Tensor], mask: Tensor, config: AlgorithmConfig, coefficient: float | None) -> Tensor | None:
    """-coefficient x distance from the reference [B, T], where the recipe subtracts it from the rewards."""
    if config.kl is None or config.kl.place != "reward":
        return None
    distance = kl(config.kl.estimator, columns["old_log_probs"], columns["reference_log_probs"], mask)
    return -(config.kl.coefficient if coefficient is None else coefficient) * distance


def _learnt(columns: Mapping[str, Tensor], config: AlgorithmConfig) -> Tensor:
    """The response mask without what is not to be learnt from [B, T]; the response mask itself where nothing can be taken out."""
    mask = columns["response_mask"]
    if "kept" in columns:
        mask = mask & columns["kept"][:, None]
    if config.off_policy is not None and config.off_policy.rejection is not None:
        drawn = (columns["old_log_probs"], columns["rollout_log_probs"])
        mask = off_policy.kept(*drawn, mask, columns["prompt"], config.off_policy.rejection)
    return mask


def _mini_batches(rows: int, parts: int, updates: int) -> Tensor:
    """Which optimizer step each row falls into, [B] from 0 on: rows are cut into contiguous parts, and each part into its mini-batches."""
    cut = [part.chunk(updates) for part in Batch({"row": torch.arange(rows)}).chunk(parts)]
    return torch.tensor([number for part in cut for number, mini_batch in enumerate(part) for _ in range(len(mini_batch))], dtype=torch.int64)


def _selected(columns: Mapping[str, Tensor], mask: Tensor, advantages: Tensor, config: LossConfig, seed: tuple[int, ...]) -> Tensor:
    """[B, T] bool, from the tokens of the mask in order of group and sample: into how many ranks the step was cut is not seen."""
    order = columns["sample"].argsort(stable=True)
    order = order[columns.get("group", columns["prompt"])[order].argsort(stable=True)]
    mask = mask[order]
    covariance = covariances(columns["old_log_probs"][order][mask], advantages[order][mask])
    chosen = SELECTIONS.get(config.name)(covariance, config, np.random.default_rng(seed))
    return torch.zeros_like(mask).index_copy(0, order, torch.zeros_like(mask).masked_scatter(mask, chosen))


def policy_terms(inputs: LossInputs, config: LossConfig) -> LossTerms:
    """The terms [B, T] of the configured policy loss, before aggregation.

    Raises:
        ValueError: the loss gave something else, or a constant; names the loss.
    """
    terms, who = LOSSES.get(config.name)(inputs, config), f"algorithm.loss.name={config.name}"
    if not isinstance(terms, LossTerms):
        raise ValueError(f"{who} gave a {type(terms).__name__}; it must give engine.algorithms.types.LossTerms")
    _check(terms.per_token, inputs.mask, f"{who}: per_token")
    if inputs.log_probs.requires_grad and not terms.per_token.requires_grad:
        raise ValueError(f"{who}: per_token has no gradient; compute it from inputs.log_probs, and not under torch.no_grad")
    return terms


def _check(values: object, mask: torch.Tensor, what: str) -> None:
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
        raise ValueError(f"{what} is {kind}; it must be a floating-point tensor")
    if values.shape != mask.shape:
        raise ValueError(f"{what} has shape {list(values.shape)}; the response mask has {list(mask.shape)}, and every token needs its own")


def measure(batch: Batch) -> Statistics:
    """What a step's samples were like, all that were drawn: rewards, lengths, groups without signal, the mean score of every annotator.

    Args:
        batch: response_mask [B, T]; prompt, reward, response_tokens, finished [B]; the object response; what `reward_statistics` reads.
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
    statistics.update(reward_statistics(batch))
    if (responses := batch.objects.get("response")) is not None:
        statistics.add("response/duplicate_share", Mean.of(duplicates(columns["prompt"].tolist(), responses)))
    for name, column in columns.items():
        if name.endswith("/score") and column.dim() == 1:
            statistics.add(f"reward/{name.removesuffix('/score')}_mean", Mean(float(column.double().sum()), len(column)))
    return statistics


def duplicates(prompts: Sequence[int], responses: Sequence[str]) -> list[bool]:
    """Of each sample whether another one of the same prompt has the same text."""
    samples = list(zip(prompts, responses, strict=True))
    times = Counter(samples)
    return [times[sample] > 1 for sample in samples]


def measure_trained(batch: Batch, config: AlgorithmConfig) -> Statistics:
    """How much of what is trained on the off-policy correction weighs down or takes out, and how far it is from the reference.

    Args:
        batch: response_mask, old_log_probs, rollout_log_probs [B, T]; prompt [B]; reference_log_probs [B, T] where there is one.
    """
    columns = batch.tensors
    drawn = (columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"], columns["prompt"])
    statistics = off_policy.correction_statistics(*drawn, config.off_policy)
    if "reference_log_probs" in columns:
        distance = kl("k3", columns["old_log_probs"], columns["reference_log_probs"], columns["response_mask"])
        statistics.add("policy/kl_from_reference", Mean(float(distance.double().sum()), float(columns["response_mask"].count_nonzero())))
    return statistics

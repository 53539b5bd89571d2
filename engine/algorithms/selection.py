"""Which groups a step trains on, by what their samples' outcomes say: pure functions of a few numbers a row.

A group is given as its rows, and a selection is a list of groups: group k of the step that is trained on has the rows `selection[k]` of the samples
that were drawn. A row that occurs in two groups is in the step twice.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.algorithms.groups import Groups

Rows = list[int]


def by_signal(outcomes: Tensor, prompts: Tensor, valid: Tensor) -> list[tuple[Rows, bool]]:
    """The rows of each group and whether it has signal (two valid samples of different outcome), in the order of their first rows.

    Args:
        outcomes: [B] what the reward functions gave, before anything shapes it.
        prompts: [B] int64; samples of one prompt share a number.
        valid: [B] bool. The others count nowhere, but belong to their group's rows.
    """
    groups = Groups.of(outcomes, prompts, valid)
    rows: dict[int, Rows] = {}
    for row, group in enumerate(groups.index.tolist()):
        rows.setdefault(group, []).append(row)
    return [(of_group, bool(groups.informative[group])) for group, of_group in rows.items()]


def substituted(groups: Sequence[tuple[Rows, bool]], seed: Sequence[int], least_fraction: float) -> list[Rows]:
    """The groups, with one with signal in place of each that has none; without any group where too few have signal.

    Donors are drawn without replacement where there are enough of them, else with.

    Args:
        groups: from `by_signal`.
        seed: of the generator.
        least_fraction: no more than this share of the groups, rounded down, counts as too few (POLARIS: 1/3).
    """
    donors = [rows for rows, signal in groups if signal]
    empty = len(groups) - len(donors)
    if len(donors) <= int(least_fraction * len(groups) + 1e-9):
        return []
    drawn = iter(np.random.default_rng(list(seed)).choice(len(donors), empty, replace=empty > len(donors)).tolist())
    return [rows if signal else donors[next(drawn)] for rows, signal in groups]


class Visit(NamedTuple):
    """What one prompt scored in one step."""

    position: int
    """Of the prompt, in its set."""
    outcome: float
    """Mean over its samples that have a score."""
    samples: int
    """How many these are."""


def mean_outcomes(outcomes: Tensor, prompts: Tensor, scored: Tensor | None) -> list[Visit]:
    """Of each prompt with a score, in the order in which prompts first appear.

    Args:
        outcomes: [B] float, what the reward functions gave.
        prompts: [B] int, positions.
        scored: [B] bool, which samples have a score; None stands for all.
    """
    found: dict[int, list[float]] = {}
    for row, (position, outcome) in enumerate(zip(prompts.tolist(), outcomes.tolist(), strict=True)):
        if scored is None or bool(scored[row]):
            found.setdefault(position, []).append(outcome)
    return [Visit(position, math.fsum(of_prompt) / len(of_prompt), len(of_prompt)) for position, of_prompt in found.items()]

"""Accuracy with its uncertainty, in NumPy. Every interval draws from a generator of its own; the global random state is untouched."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float


def accuracy_interval(scores: ArrayLike, resamples: int, confidence: float, seed: int) -> Interval:
    """Mean score with a percentile bootstrap interval over prompts (Efron & Tibshirani 1993, chapter 13).

    Prompts are what is drawn anew, not samples: the k samples of a prompt are not independent.

    Args:
        scores: [prompts] or [prompts, k].
        resamples: bootstrap draws.
        confidence: 0.95 gives the 2.5th and 97.5th percentile of the resampled means.
        seed: of the interval's own generator.

    Raises:
        ValueError: no prompts, rows of different length, or a score that is not finite.
    """
    return _bootstrap(_per_prompt(scores, "scores"), resamples, confidence, seed)


def paired_gain_interval(before: ArrayLike, after: ArrayLike, resamples: int, confidence: float, seed: int) -> Interval:
    """Mean of after - before on the same prompts, in the same order, with a bootstrap interval over the prompts' differences.

    Args: as `accuracy_interval`; `before` and `after` may differ in k.

    Raises:
        ValueError: as `accuracy_interval`, or if the numbers of prompts differ.
    """
    first, second = _per_prompt(before, "before"), _per_prompt(after, "after")
    if len(first) != len(second):
        raise ValueError(f"a paired gain needs the same prompts twice: before has {len(first)}, after has {len(second)}")
    return _bootstrap(second - first, resamples, confidence, seed)


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> NDArray[np.float64]:
    """Unbiased estimate of the chance that at least one of k samples is right: 1 - C(n - c, k) / C(n, k).

    Computed as 1 - prod_{j < k} (n - c - j) / (n - j), which cannot overflow (Chen et al. 2021, arXiv:2107.03374, section 2.1).

    Args:
        n: samples drawn per prompt, scalar or [prompts].
        c: right ones among them, scalar or [prompts].
        k: samples one would be allowed.

    Returns:
        One estimate per prompt, in the broadcast shape of n and c.

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n for every prompt.
    """
    drawn, right = np.broadcast_arrays(np.asarray(n), np.asarray(c))
    if k < 1 or np.any(drawn < k) or np.any(right < 0) or np.any(right > drawn):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n; got k {k}, n {drawn.tolist()}, c {right.tolist()}")
    taken = np.arange(k)
    wrong = np.clip((drawn - right)[..., None] - taken, 0, None)
    return np.asarray(1 - np.prod(wrong / (drawn[..., None] - taken), axis=-1))


def avg_at_n(scores: ArrayLike) -> float:
    """Mean over prompts of the mean score of their n samples; scores [prompts, n]. Errors as `accuracy_interval`."""
    return float(_per_prompt(scores, "scores").mean())


def _per_prompt(scores: ArrayLike, name: str) -> NDArray[np.float64]:
    try:
        values = np.asarray(scores, dtype=np.float64)
    except ValueError as error:
        raise ValueError(f"{name}: every prompt needs the same number of samples, each a number") from error
    if values.ndim not in (1, 2) or values.size == 0:
        raise ValueError(f"{name} must be [prompts] or [prompts, k] with at least one of each; its shape is {list(values.shape)}")
    if not np.isfinite(values).all():
        raise ValueError(f"{name} of prompt {int(np.argwhere(~np.isfinite(values))[0, 0])} (from 0) is not finite")
    return values if values.ndim == 1 else values.mean(axis=1)


def _bootstrap(values: NDArray[np.float64], resamples: int, confidence: float, seed: int) -> Interval:
    drawn = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(mean=float(values.mean()), low=float(low), high=float(high))

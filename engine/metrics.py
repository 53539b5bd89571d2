"""Statistics that merge exactly: over micro-batches, updates and ranks, a merged value is that of all observations together.

Each statistic is kept as what it is computed from (a sum and a count, say), in plain floats, so that it pickles small.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self


class Statistic(Protocol):
    """One named quantity, not yet divided."""

    def merge(self, other: Self) -> Self:
        """The statistic of both sets of observations."""
        ...

    def result(self) -> float | None:
        """Its value; None if nothing was observed."""
        ...


@dataclass(frozen=True, slots=True)
class Sum:
    """Total of all parts."""

    total: float

    def merge(self, other: Self) -> Self:
        """Add."""
        return type(self)(self.total + other.total)

    def result(self) -> float | None:
        """The total."""
        return self.total


@dataclass(frozen=True, slots=True)
class Mean:
    """Sum of the observations over their number."""

    total: float
    count: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Mean of these observations."""
        listed = list(values)
        return cls(math.fsum(listed), len(listed))

    def merge(self, other: Self) -> Self:
        """Add sums and counts."""
        return type(self)(self.total + other.total, self.count + other.count)

    def result(self) -> float | None:
        """total / count."""
        return self.total / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class Maximum:
    """Largest observation. A NaN stays one, whatever it is merged with."""

    value: float

    def merge(self, other: Self) -> Self:
        """The larger one."""
        return self if math.isnan(self.value) or self.value >= other.value else other

    def result(self) -> float | None:
        """The largest value."""
        return self.value


@dataclass(frozen=True, slots=True)
class Moments:
    """Sum, sum of squares and number of the observations: what statistics of second order are computed from."""

    total: float
    squares: float
    count: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Moments of these observations."""
        listed = list(values)
        return cls(math.fsum(listed), math.fsum(value * value for value in listed), len(listed))

    def merge(self, other: Self) -> Self:
        """Add all three."""
        return type(self)(self.total + other.total, self.squares + other.squares, self.count + other.count)

    @property
    def spread(self) -> float:
        """Sum of squared deviations from the mean, which rounding can leave just below 0; 0 of nothing."""
        return self.squares - self.total * self.total / self.count if self.count else 0.0


class StandardDeviation(Moments):
    """sqrt((squares - total^2 / count) / (count - 1)); 0 for a single observation."""

    __slots__ = ()

    def result(self) -> float | None:
        """The unbiased-variance standard deviation."""
        if not self.count:
            return None
        # A NaN is not below 0, and stays visible.
        return 0.0 if self.count < 2 or self.spread < 0 else math.sqrt(self.spread / (self.count - 1))


class EffectiveFraction(Moments):
    """Effective sample size of importance weights w as a share of their number: (sum w)^2 / (n sum w^2), in (0, 1] (Kish 1965)."""

    __slots__ = ()

    def result(self) -> float | None:
        """1 where all weights are equal."""
        return self.total * self.total / (self.count * self.squares) if self.count else None


@dataclass(frozen=True, slots=True)
class ExplainedVariance:
    """How much of the spread of targets a prediction accounts for: 1 - Var(target - prediction) / Var(target)."""

    target: Moments
    error: Moments
    """Of target - prediction, the same observations."""

    def merge(self, other: Self) -> Self:
        """Merge both moments."""
        return type(self)(self.target.merge(other.target), self.error.merge(other.error))

    def result(self) -> float | None:
        """1 for a perfect prediction up to a constant, 0 for a constant one, below 0 for a worse one; None where the targets do not differ."""
        # Both variances have the same denominator. A constant's spread is rounding noise of its squares, and nothing can be a share of it.
        if self.target.spread <= 1e-12 * self.target.squares:
            return None
        return 1 - self.error.spread / self.target.spread


@dataclass
class Statistics:
    """Statistics by metric name."""

    entries: dict[str, Statistic] = field(default_factory=dict)

    def add(self, name: str, statistic: Statistic) -> None:
        """Merge `statistic` into what `name` has so far. ValueError if that is of another kind."""
        before = self.entries.get(name)
        if before is not None and type(before) is not type(statistic):
            raise ValueError(f"metric {name} is a {type(before).__name__} and cannot take a {type(statistic).__name__}; rename one of them")
        self.entries[name] = statistic if before is None else before.merge(statistic)

    def update(self, other: "Statistics") -> None:
        """Merge every statistic of `other` into this one."""
        for name, statistic in other.entries.items():
            self.add(name, statistic)

    def result(self) -> dict[str, float]:
        """Values by name; statistics without a single observation are left out."""
        values: Mapping[str, float | None] = {name: statistic.result() for name, statistic in self.entries.items()}
        return {name: value for name, value in values.items() if value is not None}


def merge(parts: Iterable[Statistics]) -> Statistics:
    """One `Statistics` of all parts' observations, merged in the order given, so that equal runs give equal bits."""
    merged = Statistics()
    for part in parts:
        merged.update(part)
    return merged

"""What is wrong with a configuration, and the error that says all of it at once."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a configuration."""

    key: str
    """Dotted key to look at first."""
    text: str
    """What is wrong and what to do."""
    depends_on: tuple[str, ...] = ()
    """Other keys whose values the verdict rests on."""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


class ConfigurationError(ValueError):
    """Everything that is wrong with a configuration, a line for each problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))

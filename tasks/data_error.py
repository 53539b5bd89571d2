"""The error that says where data are not what they should be."""

from collections.abc import Sequence
from pathlib import Path

SHOWN = 10
"""Problems that an error spells out; the others are counted."""


class DataError(ValueError):
    """Data that cannot be used. The message names the file and the first rows, columns and values, with the reason."""

    def __init__(self, source: Path | str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = list(problems)
        if len(self.problems) == 1:
            text = f"{source}: {self.problems[0]}"
        else:
            more = f"\n  ... and {len(self.problems) - SHOWN} more" if len(self.problems) > SHOWN else ""
            text = f"{source}: {len(self.problems)} problems\n  " + "\n  ".join(self.problems[:SHOWN]) + more
        super().__init__(text)

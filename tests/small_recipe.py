"""The main recipe, small, and the command that runs it under a root of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Sums of two digits from a hundred SFT steps: enough for an accuracy that is not zero.
SMALL = [
    "recipe=grpo_tiny",
    "resources=colocated",
    "data.chain_sum.max_terms=2",
    "data.chain_sum.sft_rows=120",
    "data.chain_sum.train_rows=100",
    "data.chain_sum.validation_rows=20",
    "data.chain_sum.test_rows=30",
    "stages.sft.steps=100",
    "stages.sft.rows_per_step=24",
    "stages.rl.steps=2",
    "stages.rl.prompts_per_step=4",
    "stages.rl.samples_per_prompt=4",
    "stages.rl.max_response_tokens=16",
    "evaluation.max_response_tokens=16",
    "evaluation.samples_per_prompt=2",
    "evaluation.bootstrap_resamples=200",
]


@dataclass
class Almanac:
    """The command, under a root of its own."""

    root: Path
    more_environment: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None
    """Where it is called from; None stands for the test's own directory."""

    def __call__(self, *arguments: str, timeout: float = 500) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), cwd=self.directory, env=self.environment(), capture_output=True, text=True, timeout=timeout, check=False
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(*arguments), env=self.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "flows.cli", *arguments]

    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "ALMANAC_", "RAY_"))}
        return inherited | {"ALMANAC_ROOT": str(self.root)} | dict(self.more_environment)

"""From samples to scores: which rewards a sample has, their sum, and what is said where one of them fails."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

from engine.config import RewardConfig
from engine.prompts import Prompt
from engine.rewards.runner import RewardError, RewardRunner
from engine.rewards.types import Canary, Function, Outcome, Sample, Status

TOLERANCE = 1e-6
"""Of a canary's score."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What one sample earned."""

    reward: float
    """The weighted sum of its parts; 0 where one of them failed."""
    status: Status
    parts: Mapping[str, float] = field(default_factory=dict)
    """Score of each part before its weight, and the further numbers of functions that give a dict, by name."""
    reason: str = ""
    """Of a failure: reward, prompt, and what happened."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A sample whose parts are being scored."""

    prompt: Prompt
    parts: Mapping[str, "Future[Outcome]"]


class Scoring:
    """The rewards of a configuration, in their processes.

    Raises:
        RewardError: a function cannot be loaded, or gives an answer that is known another score.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        names = dict.fromkeys([*config.by_data_source.values(), config.default])
        self._functions = {name: Function(name) for name in names}
        self._runner = RewardRunner(self._functions, config.runner)

    def begin(self, prompt: Prompt, response: str, response_tokens: int, finished: bool) -> Pending:
        """Asks for the scores of a sample; returns at once."""
        sample = Sample(response, prompt.ground_truth, prompt.messages, prompt.data_source, response_tokens, finished)
        name = self.config.by_data_source.get(prompt.data_source, self.config.default)
        return Pending(prompt, {name: self._runner.submit(name, sample)})

    def result(self, pending: Pending) -> Scored:
        """Waits for a sample's outcomes, as long as the runner's limit lets them be."""
        outcomes = {name: future.result() for name, future in pending.parts.items()}
        for name, outcome in outcomes.items():
            if outcome.status != "ok":
                reason = f"reward {name} {outcome.reason} for prompt {pending.prompt.id} (row {pending.prompt.index})"
                return Scored(0.0, outcome.status, reason=reason)
        parts = {name.rpartition(":")[2]: outcome.score for name, outcome in outcomes.items()}
        return Scored(sum(parts.values()), "ok", parts)

    def begin_canaries(self) -> Sequence[tuple[str, Canary, "Future[Outcome]"]]:
        """Asks about the samples whose scores are known, in the same processes."""
        known = self._runner.canaries.result()
        return [(key, canary, self._runner.submit(key, canary.sample, canary.parameters)) for key, canaries in known.items() for canary in canaries]

    def check(self, canaries: Sequence[tuple[str, Canary, "Future[Outcome]"]]) -> None:
        """RewardError names the reward whose known sample has another outcome."""
        for key, canary, future in canaries:
            outcome = future.result()
            if outcome.status != "ok" or abs(outcome.score - canary.score) > TOLERANCE:
                found = f"scored {outcome.score:g}" if outcome.status == "ok" else outcome.reason
                raise RewardError(
                    f"reward {self._functions[key].name} {found} where {canary.score:g} is known to be right: "
                    f"response {canary.sample.response!r}, ground truth {canary.sample.ground_truth!r}"
                )

    def close(self) -> None:
        """Ends the processes."""
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def against(sample: Scored, greedy: Scored) -> Scored:
    """A sample that is to be compared with a greedy answer: without a score of that it has none itself."""
    return sample if sample.status != "ok" or greedy.status == "ok" else Scored(0.0, greedy.status, reason=f"greedy answer: {greedy.reason}")


def check_failures(scored: Sequence[Scored], allowed: float) -> None:
    """RewardError where more samples than allowed have no score; names the first of them."""
    reasons = [sample.reason for sample in scored if sample.status != "ok"]
    if len(reasons) > allowed:
        raise RewardError(
            f"{len(reasons)} of {len(scored)} samples have no score, more than reward.max_failure_fraction allows; the first: {reasons[0]}"
        )

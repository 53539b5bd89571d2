"""From samples to scores: which rewards a sample has, their sum, and what is said where one of them fails."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

from engine.config import OwnRewardConfig, RewardConfig
from engine.config.reward import PartSettings
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
    outcome: float = 0.0
    """The weighted sum of the parts that do not merely shape the reward; of all parts where every one of them shapes it."""


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
        self._functions: dict[str, Function] = {}
        self._canaries: list[tuple[str, Canary]] = []
        for _, _, part in config.all_parts():
            at_once = part.samples_at_once if isinstance(part, OwnRewardConfig) else 1
            self._functions[_key(part)] = Function(part.function, part.given(), at_once)
            for known in part.canaries:
                sample = Sample(known.response, known.ground_truth, response_tokens=known.response_tokens, finished=known.finished)
                self._canaries.append((_key(part), Canary(sample, known.score)))
        self._runner = RewardRunner(self._functions, config.runner)

    def begin(self, prompt: Prompt, response: str, response_tokens: int, finished: bool) -> Pending:
        """Asks for the scores of a sample; returns at once."""
        sample = Sample(response, prompt.ground_truth, prompt.messages, prompt.data_source, response_tokens, finished)
        parts = self.config.of(prompt.data_source)
        return Pending(prompt, {name: self._runner.submit(_key(part), sample) for name, part in parts.items()})

    def result(self, pending: Pending) -> Scored:
        """Waits for a sample's outcomes, as long as the runner's limit lets them be. RewardError where two numbers of a sample have one name."""
        parts, outcomes = self.config.of(pending.prompt.data_source), {name: future.result() for name, future in pending.parts.items()}
        for name, outcome in outcomes.items():
            if outcome.status != "ok":
                reason = f"reward {parts[name].function} {outcome.reason} for prompt {pending.prompt.id} (row {pending.prompt.index})"
                return Scored(0.0, outcome.status, reason=reason)
        scores = {name: outcome.score for name, outcome in outcomes.items()}
        weighted, numbers = {name: parts[name].weight * score for name, score in scores.items()}, dict(scores)
        judging = [score for name, score in weighted.items() if not parts[name].shapes]
        for name, outcome in outcomes.items():
            if twice := numbers.keys() & outcome.metrics.keys():
                raise RewardError(f"reward {parts[name].function} gives the number {sorted(twice)[0]}, which another part is or gives; rename one")
            numbers |= outcome.metrics
        total = sum(weighted.values())
        return Scored(total, "ok", numbers, outcome=sum(judging) if judging else total)

    def begin_canaries(self) -> Sequence[tuple[str, Canary, "Future[Outcome]"]]:
        """Asks about the samples whose scores are known, in the same processes."""
        brought = [(key, canary) for key, canaries in self._runner.canaries.result().items() for canary in canaries]
        return [(key, canary, self._runner.submit(key, canary.sample, canary.parameters)) for key, canary in [*brought, *self._canaries]]

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


def _key(part: PartSettings) -> str:
    """Of the function and its parameters: parts that differ in what becomes of their score alone share it."""
    return part.model_copy(update={"weight": 1.0, "shapes": False, "canaries": []}).model_dump_json()


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

"""What happened, typed: the engine's only way to talk. Whoever listens (tracker, display) is handed each event as it occurs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from engine.control.trace import Trace
from engine.reshard.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarted:
    """A stage begins."""

    stage: str
    kind: str
    """`sft`, `rl`, or that of a stage outside the engine."""
    steps: int
    """Of other stages, their batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """A step, its updates and (in RL) its synchronisation are done."""

    stage: str
    step: int
    """Counts from 1."""
    metrics: Mapping[str, float]
    """Names in groups: `reward/mean`, `policy/entropy`, `timing/generate_seconds`, `throughput/tokens_per_second`, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesGenerated:
    """Some generations, to be looked at."""

    stage: str
    step: int
    rows: Sequence[Mapping[str, Any]]
    """Keys: sample_id, difficulty, prompt, response, ground_truth, reward, reward_status, reward_reason, reward/NAME of each part, response_tokens,
    finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsScored:
    """What a step's prompts scored, as the reward functions gave it: before rescue, substitution and whatever shapes a reward."""

    stage: str
    step: int
    prompts: Sequence[str]
    """Their ids, each once: all that the step asked and that have a sample with a score."""
    outcomes: Sequence[float]
    """Mean over a prompt's samples that have a score."""
    samples: Sequence[int]
    """How many these are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSynchronised:
    """The rollout engine of every rank now computes with the trainer's weights."""

    stage: str
    step: int
    """The one that changed them; in SFT the last."""
    version: int
    ranks: Sequence[Ledger] = ()
    """What it cost each rank."""

    @classmethod
    def of(cls, stage: str, step: int, ranks: Sequence[Mapping[str, Any]]) -> Self:
        """From what `HybridActor.synchronise` returns by rank."""
        return cls(stage=stage, step=step, version=int(ranks[0]["version"]), ranks=[Ledger.of(rank) for rank in ranks])


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatesSkipped:
    """Optimizer steps were not taken, because their gradient was not finite; the weights are as they were before them."""

    stage: str
    step: int
    trained: str
    """`policy` or `critic`."""
    updates: int
    """So many of the step's."""
    directory: str
    """Where the step's batch is kept, for `torch.load`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraced:
    """The dataflow of a step as it ran."""

    trace: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationProgressed:
    """So many samples of an evaluation are generated and scored."""

    label: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFinished:
    """The last step of a stage is done."""

    stage: str
    steps: int
    """Done, which may be fewer than were planned."""
    seconds: float
    ended_by: Literal["steps", "convergence"] = "steps"
    why: str = ""
    """The numbers that convergence was found by."""


Event = (
    StageStarted
    | StepFinished
    | UpdatesSkipped
    | SamplesGenerated
    | PromptsScored
    | WeightsSynchronised
    | StepTraced
    | EvaluationProgressed
    | StageFinished
)
Emit = Callable[[Event], None]

"""A step's samples: drawn, scored, and chosen by whether their groups have signal. Tokens stay where they are; a few numbers a row come here."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.algorithms.selection import Rows, by_signal, substituted
from engine.batch import Batch, concat
from engine.config import RLStageConfig
from engine.control.future import BatchFuture, join, stack
from engine.prompts import PromptSampler
from engine.rollout.plan import SamplePlan
from engine.trainer.session import Session

Columns = list[BatchFuture]
"""A rollout, its rewards and the columns of annotators, over the same rows."""
RESCUE, SUBSTITUTION = 1, 2
"""What a generator of random numbers is for, beside the run's seed and the step."""


class NoSignalError(RuntimeError):
    """A step found too few groups with signal, and the recipe says to stop then."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The samples of one step."""

    columns: Columns
    """All that were drawn, as they were drawn."""
    trained: Columns
    """What the step trains on."""
    group: list[int] | None = None
    """Which group each row of `trained` belongs to; None leaves that to the column `prompt`."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Nothing is left to train on."""
        return self.group == []

    def ordered(self, order: Sequence[int]) -> "Drawn":
        """With the rows of `trained` in this order."""
        group = None if self.group is None else [self.group[row] for row in order]
        return replace(self, trained=[columns.rows(order) for columns in self.trained], group=group)


@dataclass(frozen=True)
class Generation:
    """What one step of a stage draws, by the stage's `groups` and `rescue`."""

    session: Session
    stage: str
    config: RLStageConfig
    seed: int
    sampler: PromptSampler

    def draw(self, step: int) -> Drawn:
        """The step's samples. Waits for their outcomes only where `groups` or `rescue` asks for them. Raises `NoSignalError`."""
        config = self.config
        if config.groups.kind == "filter":
            return self._filtered(step)
        columns = self._generated(step, 0, self.sampler.positions(step))
        if config.groups.kind == "keep" and config.rescue is None:
            return Drawn(columns=columns, trained=columns)
        trained, outcomes = self._judged(step, 0, columns)
        metrics = rescue_metrics(outcomes)
        if config.groups.kind == "keep":
            return Drawn(columns=columns, trained=trained, metrics=metrics)
        groups = by_signal(outcomes.tensors["outcome"], outcomes.tensors["prompt"], outcomes.tensors["valid"])
        if config.groups.kind == "drop":
            selection = [rows for rows, signal in groups if signal]
            metrics["data/dropped_groups"] = float(len(groups) - len(selection))
        else:
            selection = substituted(groups, (self.seed, step, SUBSTITUTION), config.groups.least_fraction)
            metrics["data/substituted_groups"] = float(sum(not signal for _, signal in groups) if selection else 0)
        return chosen(columns, trained, selection, metrics)

    def _filtered(self, step: int) -> Drawn:
        """Generations until there are enough groups with signal."""
        config, settings = self.config, self.config.groups
        assert settings.kind == "filter"
        generations: list[Columns] = []
        trained: list[Columns] = []
        judged: list[Batch] = []
        found: list[Rows] = []
        groups = rows = 0
        while len(found) < config.prompts_per_step and len(generations) < settings.max_generations:
            number = len(generations)
            positions = self.sampler.more_positions(step, number) if number else self.sampler.positions(step)
            if not positions:
                break
            generations.append(self._generated(step, number, positions))
            columns, outcomes = self._judged(step, number, generations[-1])
            trained.append(columns)
            judged.append(outcomes)
            of_generation = by_signal(outcomes.tensors["outcome"], outcomes.tensors["prompt"], outcomes.tensors["valid"])
            found += [[rows + row for row in of_group] for of_group, signal in of_generation if signal]
            groups, rows = groups + len(of_generation), rows + len(outcomes)
        if len(found) < config.prompts_per_step and settings.when_spent == "stop":
            raise NoSignalError(
                f"stage {self.stage}, step {step}: {len(found)} of prompts_per_step={config.prompts_per_step} groups have signal after "
                f"{len(generations)} generations of groups.max_generations={settings.max_generations}, of {groups} prompts in all. Raise it, take "
                "prompts that are neither always nor never answered right, or set groups.when_spent=train"
            )
        metrics = rescue_metrics(concat(judged)) | {
            "data/generations": float(len(generations)),
            "data/filtered_groups": float(groups - len(found)),
            "data/surplus_groups": float(max(0, len(found) - config.prompts_per_step)),
        }
        return chosen(_stacked(generations), _stacked(trained), found[: config.prompts_per_step], metrics)

    def _generated(self, step: int, number: int, positions: Sequence[int]) -> Columns:
        """Samples of these prompts and their rewards, the `number`-th generation of the step; returns at once."""
        config = self.config
        samples, greedy = (config.samples_per_prompt, config.sampling, config.max_response_tokens), config.algorithm.advantage.needs_greedy
        place = (self.seed, self.stage, step)
        plan = SamplePlan(self.stage, tuple(positions), *samples, *place, greedy_baseline=greedy, length_extension=config.length_extension)
        rollout = self.session.actor.generate(plan)
        scores, shuffle = self.session.reward.score(rollout), config.reward.shuffle  # begin with each sample when it is finished
        annotations = [annotator.annotations(rollout) for annotator in self.session.annotators.values()]
        weights = {name: annotator.reward_weight for name, annotator in self.session.config.annotators.items() if annotator.reward_weight}
        dealt = (self.seed, step, *([number] if number else [])) if shuffle else None
        return [rollout, self.session.reward.combine(join(scores, *annotations), weights, dealt), *annotations]

    def _judged(self, step: int, number: int, columns: Columns) -> tuple[Columns, Batch]:
        """The columns after the rescue, where there is one, and what `HybridActor.outcomes` says of each row. Waits."""
        actor = self.session.actor
        if self.config.rescue is not None:
            columns = [actor.rescue(join(*columns), (self.seed, step, RESCUE, number))]
        return columns, actor.outcomes(join(*columns)).get()


def chosen(columns: Columns, trained: Columns, selection: Sequence[Rows], metrics: dict[str, float]) -> Drawn:
    """The rows that a selection names, each with the number of its group."""
    rows = [row for of_group in selection for row in of_group]
    group = [number for number, of_group in enumerate(selection) for _ in of_group]
    return Drawn(columns=columns, trained=[one.rows(rows) for one in trained], group=group, metrics=metrics)


def rescue_metrics(outcomes: Batch) -> dict[str, float]:
    """How many groups were rescued, and how old the responses are that did it; nothing without a memory."""
    if "rescued" not in outcomes.tensors:
        return {}
    rescued, versions = outcomes.tensors["rescued"], outcomes.tensors["weight_version"]
    metrics = {"data/rescued_groups": float(rescued.sum())}
    if rescued.any():
        metrics["data/rescued_age_versions"] = float((versions.max() - versions[rescued]).double().mean())
    return metrics


def _stacked(generations: Sequence[Columns]) -> Columns:
    return [stack(column) for column in zip(*generations, strict=True)]

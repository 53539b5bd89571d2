"""What a step draws and trains on, through real workers of three ranks in this process: futures, selections and memory, without Ray or a model.

A policy is a table here: the outcomes of a prompt's samples. Every column of a row says which sample it is, so that a row that falls apart is seen.
"""

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.algorithms.rescue import RescueMemory
from engine.batch import Batch
from engine.config import RewardConfig, RewardRunnerConfig, RLStageConfig
from engine.control import future as futures
from engine.control.dispatch import EVERYTHING, cut
from engine.control.future import BatchFuture, Joined, Parts
from engine.control.mesh import Mesh
from engine.control.recorder import Recorder
from engine.prompts import Prompt, PromptSampler
from engine.rewards.scoring import Scoring
from engine.rollout.plan import SamplePlan
from engine.trainer.generation import Drawn, Generation, NoSignalError
from engine.workers.actor import HybridActor
from engine.workers.reward import RewardWorker

RANKS, SAMPLES, COUNT = 3, 4, 20
PROMPTS = [Prompt(f"{index:016x}", index, ({"role": "user", "content": str(index)},), "toy", "right") for index in range(COUNT)]
NO_SIGNAL, ALL_WRONG = range(0, COUNT, 2), range(0, COUNT, 4)
"""Of every two prompts one has no signal; of these every other one is always answered wrong, the others always right."""


def outcomes(position: int, step: int) -> list[bool]:
    if position in NO_SIGNAL:
        return [position not in ALL_WRONG] * SAMPLES
    return [(position + number + step) % 3 == 0 for number in range(SAMPLES)]


class Group:
    """Calls the methods of workers as a `WorkerGroup` does, at once and in this process."""

    def __init__(self, workers: list[Any]) -> None:
        self._workers, self._mesh = workers, Mesh.grouped(len(workers))

    def __getattr__(self, operator: str) -> Callable[..., BatchFuture]:
        def call(*arguments: Any) -> BatchFuture:
            mode = getattr(type(self._workers[0]), operator).__registration__.mode
            results = []
            for rank in mode.ranks(self._mesh):
                share = mode.share(self._mesh, rank)
                results.append(getattr(self._workers[rank], operator)(*(self._given(argument, share) for argument in arguments)))
            calls = [SimpleNamespace(operator=operator, report=SimpleNamespace(rows=len(result), bytes_out=0)) for result in results]
            return BatchFuture(Parts(results, [0] * len(results), mode), calls, calls, 1.0, Recorder())  # type: ignore[arg-type]

        return call

    def _given(self, argument: Any, share: Any) -> Any:
        if not isinstance(argument, BatchFuture | Joined):
            return cut(argument, share)
        several = argument.futures if isinstance(argument, Joined) else [argument]
        return futures.batch.join(*futures.batch.aligned([one.parts.share([call.report.rows for call in one.spoken], share) for one in several]))


class Actor(HybridActor):
    """The actor without engines: it answers from the table."""

    def __init__(self, stage: RLStageConfig) -> None:
        self._stage = stage
        self._memory = None if stage.rescue is None else RescueMemory(stage.rescue)

    def generate(self, plan: SamplePlan) -> Batch:
        places, version = plan.places(), plan.step
        right = [outcomes(position, plan.step)[number] for position, number in places]
        mark = torch.tensor([1000 * plan.step + 10 * position + number for position, number in places])
        # Of different lengths, by prompt.
        lengths = torch.tensor([2 + position % 3 for position, _ in places])
        attention = torch.arange(int(lengths.max()) if places else 0) < lengths[:, None]
        return Batch(
            {
                "input_ids": torch.where(attention, mark[:, None], 0),
                "attention_mask": attention,
                "response_mask": attention & (torch.arange(attention.shape[1]) > 0),
                "prompt": torch.tensor([position for position, _ in places], dtype=torch.int64),
                "sample": torch.tensor([number for _, number in places], dtype=torch.int64),
                "response_tokens": lengths - 1,
                "finished": torch.tensor([position % 5 > 0 for position, _ in places], dtype=torch.bool),
                "weight_version": torch.full((len(places),), version),
            },
            {"response": ["\\boxed{right}" if one else "wrong" for one in right]},
            {"prompt_set": plan.prompt_set},
        )

    generate.__registration__ = HybridActor.generate.__registration__  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def scoring() -> Iterator[Scoring]:
    """The processes of the rewards, which all ranks of all tests share."""
    with Scoring(RewardConfig(default="exact_match", runner=RewardRunnerConfig(processes=1))) as opened:
        yield opened


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch, scoring: Scoring) -> Callable[..., list[Drawn]]:
    """Some steps of a stage with these settings."""
    monkeypatch.setattr(futures.ray, "get", lambda value: value)
    monkeypatch.setattr(futures, "wait", lambda *_: None)

    def run(steps: int = 1, per_step: int = 6, **settings: Any) -> list[Drawn]:
        values = {"prompts_per_step": per_step, "samples_per_prompt": SAMPLES, "max_prompt_tokens": 8, "max_response_tokens": 8, **settings}
        stage = RLStageConfig.model_validate({"kind": "rl", "steps": steps, "training": {"optimizer": {"learning_rate": 1e-3}}, **values})
        judges = []
        for _ in range(RANKS):
            judge = object.__new__(RewardWorker)
            judge._reward, judge._scoring, judge._ahead, judge.ranks = scoring.config, scoring, {}, RANKS
            judge.prompt_sets = {"rl": SimpleNamespace(prompts=PROMPTS)}  # type: ignore[dict-item]
            judges.append(judge)
        session: Any = SimpleNamespace(
            actor=Group([Actor(stage) for _ in range(RANKS)]), reward=Group(judges), annotators={}, config=SimpleNamespace(annotators={})
        )
        generation = Generation(session, "rl", stage, 3, PromptSampler(PROMPTS, stage.prompts_per_generation, 3))
        return [generation.draw(step) for step in range(1, steps + 1)]

    return run


def rows(columns: list[BatchFuture]) -> Batch:
    found = futures.join(*columns).get()
    # Every row is one sample in all its columns. Mutation: rewards or texts left where they were.
    assert (found.objects["response"], found.tensors["outcome"].tolist()) == (
        ["\\boxed{right}" if outcome else "wrong" for outcome in found.tensors["reward"].tolist()],
        found.tensors["reward"].tolist(),
    )
    marks = found.tensors["input_ids"].max(dim=1).values
    expected = 1000 * found.tensors["weight_version"] + 10 * found.tensors["prompt"]
    assert ((marks - expected) // SAMPLES == 0).all()
    for mark, outcome in zip(marks.tolist(), found.tensors["outcome"].tolist(), strict=True):
        assert outcome == float(outcomes(mark % 1000 // 10, mark // 1000)[mark % 10])
    return found


def prompts(batch: Batch) -> list[int]:
    """The prompt of each group of four rows."""
    of_groups = batch.tensors["prompt"].view(-1, SAMPLES)
    assert (of_groups == of_groups[:, :1]).all()
    return [int(prompt) for prompt in of_groups[:, 0]]


def metrics(drawn: Drawn) -> Mapping[str, float]:
    return {name.removeprefix("data/"): value for name, value in drawn.metrics.items()}


SAMPLER = PromptSampler(PROMPTS, 6, 3)


def test_kept_as_they_come(draw: Callable[..., list[Drawn]]) -> None:
    (drawn,) = draw()
    assert drawn.trained is drawn.columns
    assert (drawn.group, drawn.metrics) == (None, {})
    assert prompts(rows(drawn.trained)) == SAMPLER.positions(1)


def test_filtered_until_there_are_enough(draw: Callable[..., list[Drawn]]) -> None:
    first, second = draw(2, groups={"kind": "filter"})
    for step, drawn in enumerate((first, second), start=1):
        everything, trained = rows(drawn.columns), rows(drawn.trained)
        generations = int(drawn.metrics["data/generations"])
        asked = [*SAMPLER.positions(step), *(position for number in range(1, generations) for position in SAMPLER.more_positions(step, number))]
        assert prompts(everything) == asked
        informative = [position for position in asked if position not in NO_SIGNAL]
        # Mutations: the last groups instead of the first; a group of the surplus; one generation too many.
        assert prompts(trained) == informative[:6]
        assert len([position for position in asked[: 6 * (generations - 1)] if position not in NO_SIGNAL]) < 6
        assert generations > 1
        assert metrics(drawn) == {
            "generations": generations,
            "filtered_groups": len(asked) - len(informative),
            "surplus_groups": len(informative) - 6,
        }
        assert drawn.group == [number for number in range(6) for _ in range(SAMPLES)]


def test_more_prompts_at_a_time(draw: Callable[..., list[Drawn]]) -> None:
    (drawn,) = draw(per_step=2, groups={"kind": "filter", "prompts_per_generation": 12})
    assert len(rows(drawn.columns)) == 12 * SAMPLES
    assert (len(rows(drawn.trained)), drawn.metrics["data/generations"]) == (2 * SAMPLES, 1)


def test_generations_are_bounded(draw: Callable[..., list[Drawn]]) -> None:
    (drawn,) = draw(groups={"kind": "filter", "max_generations": 1})
    informative = [position for position in SAMPLER.positions(1) if position not in NO_SIGNAL]
    assert prompts(rows(drawn.trained)) == informative
    assert 0 < len(informative) < 6
    with pytest.raises(NoSignalError, match=rf"stage rl, step 1: {len(informative)} of prompts_per_step=6 groups .* after 1 generations"):
        draw(groups={"kind": "filter", "max_generations": 1, "when_spent": "stop"})
    # All twenty prompts have been asked, and ten have signal. Mutation: ask the same prompts again.
    (drawn,) = draw(per_step=15, groups={"kind": "filter", "max_generations": 9})
    assert (drawn.metrics["data/generations"], len(rows(drawn.columns)), len(rows(drawn.trained))) == (2, 20 * SAMPLES, 10 * SAMPLES)


def test_dropped(draw: Callable[..., list[Drawn]]) -> None:
    (drawn,) = draw(groups={"kind": "drop"})
    informative = [position for position in SAMPLER.positions(1) if position not in NO_SIGNAL]
    assert prompts(rows(drawn.trained)) == informative
    assert metrics(drawn) == {"dropped_groups": 6 - len(informative)}
    # In another order rows keep their groups. Mutation: the group's numbers left as they were.
    order = list(reversed(range(len(drawn.group or []))))
    turned = drawn.ordered(order)
    assert rows(turned.trained).tensors["prompt"].tolist() == [informative[group] for group in turned.group or []]


def test_substituted(draw: Callable[..., list[Drawn]]) -> None:
    (drawn,) = draw(groups={"kind": "substitute", "least_fraction": 0.2})
    before = SAMPLER.positions(1)
    informative = [position for position in before if position not in NO_SIGNAL]
    after = prompts(rows(drawn.trained))
    assert len(after) == 6
    assert all(position in informative for position in after)
    assert [found for found, position in zip(after, before, strict=True) if position in informative] == informative
    # Copies are groups of their own.
    assert drawn.group == [number for number in range(6) for _ in range(SAMPLES)]
    assert metrics(drawn) == {"substituted_groups": 6 - len(informative)}
    assert prompts(rows(drawn.columns)) == before


@pytest.mark.parametrize("groups", [{"kind": "substitute", "least_fraction": 0.99}, {"kind": "filter", "max_generations": 1}, {"kind": "drop"}])
def test_a_step_may_have_nothing_to_train_on(draw: Callable[..., list[Drawn]], monkeypatch: pytest.MonkeyPatch, groups: dict[str, Any]) -> None:
    monkeypatch.setattr("test_generation.NO_SIGNAL", range(COUNT))
    monkeypatch.setattr("test_generation.ALL_WRONG", range(COUNT))
    (drawn,) = draw(groups=groups)
    assert drawn.empty
    assert len(rows(drawn.columns)) == 6 * SAMPLES


def test_truncated_answers_make_no_signal(draw: Callable[..., list[Drawn]]) -> None:
    # Every fifth prompt's answers are all truncated. Mutation: `valid` without a look at what is done about them.
    (plain,), (masked,) = draw(per_step=20, groups={"kind": "drop"}), draw(per_step=20, groups={"kind": "drop"}, truncated={"kind": "mask_before"})
    assert prompts(rows(masked.trained)) == [position for position in prompts(rows(plain.trained)) if position % 5]
    assert len(rows(masked.trained)) < len(rows(plain.trained))


@pytest.mark.parametrize("kind", ["keep", "drop", "filter"])
def test_helpless_groups_are_rescued(draw: Callable[..., list[Drawn]], monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def learnt_then_forgotten(position: int, step: int) -> list[bool]:
        return [step == 1 and position % 2 == 0 and number == 1 for number in range(SAMPLES)]

    monkeypatch.setattr("test_generation.outcomes", learnt_then_forgotten)
    first, second = draw(2, per_step=20, rescue={}, groups={"kind": kind})
    assert first.metrics["data/rescued_groups"] == 0
    found, drawn = rows(second.trained), rows(second.columns)
    rescued = found.tensors["rescued"]
    # Each group that has a remembered response has it once, with the version that drew it.
    assert (second.metrics["data/rescued_groups"], second.metrics["data/rescued_age_versions"]) == (10, 1)
    assert sorted(found.tensors["prompt"][rescued].tolist()) == list(range(0, 20, 2))
    assert set(found.tensors["weight_version"][rescued].tolist()) == {1}
    # Which makes signal where there was none; and what was drawn is as it was drawn.
    assert len(found) == (20 if kind == "keep" else 10) * SAMPLES
    assert not drawn.tensors["outcome"].any()
    assert "rescued" not in drawn.tensors


def test_selections_go_to_ranks_as_they_are_cut(draw: Callable[..., list[Drawn]]) -> None:
    (drawn,) = draw(groups={"kind": "drop"})
    whole = rows(drawn.trained)
    sizes = [call.report.rows for call in drawn.trained[0].spoken]
    shares = [drawn.trained[0].parts.share(sizes, share) for share in [futures.Share(index, RANKS) for index in range(RANKS)]]
    assert [row for share in shares for row in share.tensors["prompt"].tolist()] == whole.tensors["prompt"].tolist()
    assert drawn.trained[0].parts.origins(sizes, EVERYTHING) == {0: 1.0}

"""What annotators and rollout backends of somebody's own give is looked at before it travels, and blamed by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.config import AnnotatorConfig, EngineConfig
from engine.rollout.backend import Response
from engine.workers.base import Annotator
from engine.workers.columns import greedy_columns, in_order

ROLLOUT = Batch({"input_ids": torch.zeros(4, 6, dtype=torch.int64), "prompt": torch.arange(4)})


def annotator(given: Any, reward_weight: float = 0.0) -> Annotator:
    class Fixed(Annotator):
        def annotate(self, rollout: Batch) -> Any:
            return given

    config = EngineConfig(max_context_tokens=8, annotators={"judge": AnnotatorConfig(worker="my_judge:Judge", reward_weight=reward_weight)})
    return Fixed(name="judge", config=config, model_directory=Path(), device="cpu", dtype="float32", rank=0, ranks=1)


def test_columns_get_the_annotators_name() -> None:
    given = {"score": torch.ones(4), "by_token": torch.ones(4, 6), "kind": torch.arange(4)}
    found = annotator(Batch(given), reward_weight=0.5).annotations(ROLLOUT)
    assert {f"judge/{name}" for name in given} == set(found.tensors)
    assert annotator(Batch({"kind": torch.arange(4)})).annotations(ROLLOUT).tensors["judge/kind"].tolist() == [0, 1, 2, 3]


# Mutation of each: take the check that gives this text out of `Annotator._checked`; a run then blames other columns, or none.
@pytest.mark.parametrize(
    ("given", "weight", "text"),
    [
        (torch.ones(4), 0.0, "annotate gave a Tensor; it must give an engine.batch.Batch of tensors"),
        (Batch({"score": torch.ones(3)}), 0.0, "its column score has 3 rows, and the rollout has 4"),
        (Batch({"by_token": torch.ones(5, 6)}), 0.0, "its column by_token has 5 rows, and the rollout has 4"),
        (Batch({"features": torch.ones(4, 2)}), 0.0, r"its column features has 2 tokens a row, and the rollout has 6; give \[B\] or \[B, T\]"),
        (Batch({"score": torch.ones(4, 6)}), 0.0, "its column score must be one finite number a row"),
        (Batch({"score": torch.tensor([0.0, 1.0, torch.nan, 0.0])}), 0.0, "its column score must be one finite number a row"),
        (Batch({"other": torch.ones(4)}), 0.5, "gave no column score for reward_weight to multiply"),
        (Batch({"score": torch.ones(4)}, {"words": ["a"] * 4}), 0.0, "annotate gave the objects words"),
    ],
)
def test_columns_that_do_not_fit_name_the_annotator(given: Any, weight: float, text: str) -> None:
    with pytest.raises(ValueError, match=f"annotators.judge: .*{text}"):
        annotator(given, weight).annotations(ROLLOUT)


def test_a_rollout_backend_that_leaves_something_out_is_named() -> None:
    one, other = Response([5, 1], [-0.1, -0.2], True), Response([7], [-0.3], False)
    # Mutation: the order in which they came.
    assert in_order({1: other, 0: one}, 2, "vllm") == [one, other]
    # Mutations: leave either check out: a KeyError, and columns that differ in width for no visible reason.
    with pytest.raises(ValueError, match=r"rollout\.backend=my_rollout:Mine gave no response to 2 of 3 requests, such as number 1"):
        in_order({0: one}, 3, "my_rollout:Mine")
    with pytest.raises(ValueError, match=r"rollout\.backend=my_rollout:Mine gave request 1 3 tokens and 2 log-probs"):
        in_order({0: one, 1: Response([1, 2, 3], [0.0, 0.0], True)}, 2, "my_rollout:Mine")


def test_each_row_has_the_greedy_answer_to_its_prompt() -> None:
    # Prompts 7 and 3 were answered in this order. Mutation: answers in the order of the rows.
    answers = [Response([1, 2, 3], [0.0] * 3, True), Response([4], [0.0], False)]
    columns = greedy_columns([7, 7, 3, 7], [7, 3], answers, ["seven", "three"])
    assert columns.objects["greedy_response"] == ["seven", "seven", "three", "seven"]
    assert columns.tensors["greedy_tokens"].tolist() == [3, 3, 1, 3]
    assert columns.tensors["greedy_finished"].tolist() == [True, True, False, True]

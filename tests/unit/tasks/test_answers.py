"""Whether a ground truth can be graded is asked of the reward itself, in every form that a shipped reward reads."""

import pytest

from engine.config import RewardConfig
from engine.prompts import Prompt
from tasks.answers import FORMS, graded

THINKING = {"require_think": True}


def asked(ground_truth: str) -> Prompt:
    return Prompt(messages=({"role": "user", "content": "?"},), data_source="sums", ground_truth=ground_truth, id="p0", index=0)


def test_every_form_holds_the_answer() -> None:
    assert [form.format("1/2") for form in FORMS] == [r"\boxed{1/2}", "1/2", "Answer: 1/2", "#### 1/2", r"<think></think>\boxed{1/2}"]


# Mutation: no form with a thinking that ends: every row of the recipes that ask for one earns nothing.
@pytest.mark.parametrize(
    "part",
    [
        {"function": "math_verify"},
        {"function": "math_verify", "require_box": True, **THINKING},
        {"function": "exact_match", **THINKING},
        {"function": "exact_match"},
    ],
)
def test_a_readable_ground_truth_is_right(part: dict[str, object]) -> None:
    reward = RewardConfig.model_validate({"default": {str(part["function"]): part}})
    ((verdict,),) = graded([([asked("7")], [reward])], 10)
    assert verdict == "right"


def test_one_that_cannot_be_read_is_refused() -> None:
    reward = RewardConfig.model_validate({"default": {"math_verify": {"function": "math_verify", **THINKING}}})
    assert graded([([asked(""), asked("7")], [reward])], 10) == [["refused", "right"]]

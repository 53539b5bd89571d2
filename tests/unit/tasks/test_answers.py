"""Whether a ground truth can be graded is asked of the reward itself, in every form that a shipped reward reads."""

import pytest

from engine.config import RewardConfig
from engine.prompts import Prompt
from engine.rewards.scoring import Scoring
from tasks.answers import FORMS, graded
from tasks.compose import compose

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


def earned(reward: RewardConfig, *responses: str) -> list[float]:
    with Scoring(reward) as scoring:
        return [scoring.result(scoring.begin(asked("7"), response, 1, finished=True)).outcome for response in responses]


# Mutations: leave require_think out of the reward of a stage; ask for it in the evaluation's, too.
@pytest.mark.parametrize("recipe", ["polaris_qwen3_4b", "polaris_r1_distill_7b", "polaris_qwen3_1_7b", "polaris_tiny"])
def test_a_right_answer_without_an_end_of_thinking_is_wrong_in_training_alone(recipe: str) -> None:
    config = compose([f"recipe={recipe}"])
    responses = (r"\boxed{7}", r"<think></think>\boxed{7}")
    assert earned(config.evaluation_reward, *responses) == [1.0, 1.0]
    rewards = {stage.reward.digest(): stage.reward for stage in config.generating_stages().values()}
    assert [earned(reward, *responses) for reward in rewards.values()] == [[0.0, 1.0]] * len(rewards)
    assert rewards

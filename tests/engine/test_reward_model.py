"""A discriminative reward model beside the reward functions: what it says of a chat is what transformers says, and it counts by its weight."""

from pathlib import Path
from typing import Any

import pytest
import torch
from probe import open_probed
from toy import ARCHITECTURE, CONVERSATIONS, SFT, prompt
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from engine.config import AnnotatorConfig, EngineConfig, ModelConfig, OptimizerConfig, PoolConfig, RewardConfig, RLStageConfig, StageTrainingConfig
from engine.control.deadline import WorkerError
from engine.events import SamplesGenerated, StepFinished, StepTraced
from engine.model import create
from engine.trainer.session import Session
from engine.trainer.sft import train_sft
from engine.trainer.sync import train_rl

WEIGHT = 0.5
PROMPTS = [prompt(f"{a}+{b}", index=4 * a + b, answer=str(1 + (a + b) % 2)) for a in range(2) for b in range(4)]
RL = RLStageConfig(
    kind="rl",
    steps=1,
    prompts_per_step=4,
    samples_per_prompt=4,
    max_prompt_tokens=32,
    max_response_tokens=8,
    reward=RewardConfig(default="exact_match"),
    training=StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-3)),
)


def judge(directory: Path, labels: int = 1) -> Path:
    """A sequence classifier with random weights that differ enough for its scores to differ."""
    made = create(ModelConfig(architecture=ARCHITECTURE), 1, directory / "base")
    config = AutoConfig.from_pretrained(made, num_labels=labels)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(directory / "judge")
    AutoTokenizer.from_pretrained(made).save_pretrained(directory / "judge")
    return directory / "judge"


def with_judge(config: EngineConfig, path: Path) -> EngineConfig:
    annotator = AnnotatorConfig(worker="reward_model", parameters={"path": str(path), "rows_per_pass": 3}, reward_weight=WEIGHT)
    pool = PoolConfig(ranks=1, device="cpu")
    resources = config.resources.model_copy(update={"pools": {"judges": pool}, "roles": {"judge": "judges"}})
    rollout = config.rollout.model_copy(update={"backend": "transformers"})
    return config.model_copy(update={"annotators": {"judge": annotator}, "resources": resources, "rollout": rollout})


def test_scores_of_whole_chats(cluster: None, engine_config: EngineConfig, model_directory: Path, tmp_path: Path) -> None:
    path, events = judge(tmp_path), list[Any]()
    with open_probed(with_judge(engine_config, path), model_directory, tmp_path) as session:
        train_sft(session, "sft", SFT.model_copy(update={"steps": 20}), CONVERSATIONS, seed=0, emit=lambda event: None)
        train_rl(session, "rl", RL, PROMPTS, 0, events.append)
    (metrics,) = [event.metrics for event in events if isinstance(event, StepFinished)]
    (rows,) = [event.rows for event in events if isinstance(event, SamplesGenerated)]
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    scores = []
    for row in rows:
        chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
        with torch.no_grad():
            scores.append(float(model(**ids).logits[0, 0]))
        right = float(row["response"] == f"\\boxed{{{row['ground_truth']}}}")
        # Mutations: the last token of the padded row in place of the chat's own; the prompt left out of the chat; the weight left out.
        assert row["reward"] == pytest.approx(right + WEIGHT * scores[-1], abs=1e-4)
    assert len({round(score, 3) for score in scores}) > 2
    assert metrics["reward/judge_mean"] == pytest.approx(sum(scores) / len(scores), abs=1e-4)
    (trace,) = [event.trace for event in events if isinstance(event, StepTraced)]
    assert {operation.pool for operation in trace.operations if operation.role == "judge"} == {"judges"}


def test_a_classifier_of_two_labels_is_no_reward_model(cluster: None, engine_config: EngineConfig, model_directory: Path, tmp_path: Path) -> None:
    config = with_judge(engine_config, judge(tmp_path, labels=2))
    with (
        pytest.raises(WorkerError, match=r"judges rank 0, add raised(.|\n)*judge has 2 labels; a reward model has one"),
        Session.open(config, model_directory, tmp_path),
    ):
        pass

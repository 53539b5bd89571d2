"""LoRA through the whole engine: the rollout uses the adapter that was trained, and the reference is the base without it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from probe import open_probed, weights
from toy import CONVERSATIONS, SFT, prompt
from transformers import AutoModelForCausalLM

from engine.config import AlgorithmConfig, EngineConfig, KLConfig, LoRAConfig, OptimizerConfig, RewardConfig, RLStageConfig, StageTrainingConfig
from engine.control.future import join
from engine.events import StepFinished, StepTraced
from engine.trainer.session import Session
from engine.trainer.sft import train_sft
from engine.trainer.sync import train_rl

LORA = LoRAConfig(rank=4, alpha=16.0)
STAGE = RLStageConfig(
    kind="rl",
    steps=2,
    prompts_per_step=4,
    samples_per_prompt=4,
    max_prompt_tokens=32,
    max_response_tokens=8,
    algorithm=AlgorithmConfig(kl=KLConfig(coefficient=0.1)),
    reward=RewardConfig(default="exact_match"),
    training=StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-2), max_tokens_per_micro_batch=128),
)
PROMPTS = [prompt(f"{a}+{b}", index=4 * a + b, answer=str(1 + (a + b) % 2)) for a in range(2) for b in range(4)]


class Trained:
    """A session with adapters, and what happened in it: SFT, then two RL steps."""

    def __init__(self, session: Session) -> None:
        self.session, self.events = session, list[Any]()
        train_sft(session, "teach", SFT, CONVERSATIONS, seed=0, emit=lambda event: None)
        train_rl(session, "rl", STAGE, PROMPTS, 0, self.events.append)


@pytest.fixture(scope="module")
def trained(cluster: None, engine_config: EngineConfig, model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    training = engine_config.training.model_copy(update={"lora": LORA})
    config = engine_config.model_copy(update={"training": training, "reference": True})
    with open_probed(config, model_directory, tmp_path_factory.mktemp("lora")) as session:
        yield Trained(session)


def test_the_rollout_uses_the_adapter_that_was_trained(trained: Trained) -> None:
    for event in (event for event in trained.events if isinstance(event, StepFinished)):
        # Mutation: synchronise the base's weights.
        assert event.metrics["policy/max_log_prob_difference"] <= 1e-4
        # What it drew with is not the base. Mutation: the reference with the adapter on.
        assert event.metrics["policy/kl_from_reference"] > 1e-2


def test_the_policy_is_its_own_reference(trained: Trained, model_directory: Path) -> None:
    operations = {
        f"{operation.role}.{operation.operator}" for event in trained.events if isinstance(event, StepTraced) for operation in event.trace.operations
    }
    assert "actor.reference_log_prob" in operations
    assert not any(name.startswith("reference.") for name in operations)
    # Its log-probs are those of the model that the adapter sits on.
    session = trained.session
    rollout = session.actor.generate(_plan(session))
    found = join(rollout, session.actor.reference_log_prob(rollout)).get()
    base = AutoModelForCausalLM.from_pretrained(model_directory)
    with torch.no_grad():
        logits = base(found.tensors["input_ids"], attention_mask=found.tensors["attention_mask"].long()).logits
    expected = logits.log_softmax(-1)[:, :-1].gather(-1, found.tensors["input_ids"][:, 1:, None]).squeeze(-1)
    mask = found.tensors["response_mask"][:, 1:]
    torch.testing.assert_close(found.tensors["reference_log_probs"][:, 1:][mask], expected[mask], atol=1e-4, rtol=0)


def test_exported_alone_and_merged(trained: Trained, model_directory: Path, tmp_path: Path) -> None:
    merged = AutoModelForCausalLM.from_pretrained(trained.session.export(tmp_path / "model"))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_directory), tmp_path / "adapter")
    ids = torch.randint(7, 100, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # Mutation: alpha / rank left out of either.
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(merged(ids).logits, AutoModelForCausalLM.from_pretrained(model_directory)(ids).logits, atol=1e-2)


def test_only_layers_with_adapters_move(trained: Trained, model_directory: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(model_directory).state_dict()
    changed = {name for name, tensor in weights(trained.session).items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(name.endswith(("_proj.weight",)) for name in changed)


def _plan(session: Session) -> Any:
    from engine.rollout.plan import SamplePlan

    return SamplePlan("rl", tuple(range(len(PROMPTS))), 2, STAGE.sampling, 8, 5, "look", 0)

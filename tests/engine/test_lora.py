"""LoRA through the whole engine: the rollout uses the adapter that was trained, and the reference is the base without it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from probe import adapter_bytes, base, load_the_adapter_again, multiply_the_base, open_probed, skip_the_adapter, weights
from toy import CONVERSATIONS, SFT, prompt
from transformers import AutoModelForCausalLM

from engine.config import AlgorithmConfig, EngineConfig, KLConfig, LoRAConfig, OptimizerConfig, RewardConfig, RLStageConfig, StageTrainingConfig
from engine.control.deadline import WorkerError
from engine.control.future import join
from engine.events import StepFinished, StepTraced, WeightsSynchronised
from engine.trainer.session import Session
from engine.trainer.sft import train_sft
from engine.trainer.sync import DisagreementError, train_rl

WIDE = LoRAConfig(rank=4, alpha=16.0)
SETTINGS: dict[str, tuple[dict[str, Any], LoRAConfig]] = {
    "vllm": ({}, WIDE),
    "two ranks an engine": (
        {"tensor_parallel_ranks": 2},
        LoRAConfig(rank=3, alpha=12.0, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]),
    ),
    "transformers": ({"backend": "transformers"}, WIDE),
}
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

    def __init__(self, session: Session, lora: LoRAConfig) -> None:
        self.session, self.lora, self.events = session, lora, list[Any]()
        train_sft(session, "teach", SFT, CONVERSATIONS, seed=0, emit=lambda event: None)
        train_rl(session, "rl", STAGE, PROMPTS, 0, self.events.append)


@pytest.fixture(scope="module", params=SETTINGS)
def trained(
    request: pytest.FixtureRequest, cluster: None, engine_config: EngineConfig, model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trained]:
    setting, lora = SETTINGS[request.param]
    training = engine_config.training.model_copy(update={"lora": lora})
    rollout = engine_config.rollout.model_copy(update=setting)
    config = engine_config.model_copy(update={"training": training, "rollout": rollout, "reference": True})
    with open_probed(config, model_directory, tmp_path_factory.mktemp("lora")) as session:
        yield Trained(session, lora)


def test_the_rollout_uses_the_adapter_that_was_trained(trained: Trained) -> None:
    steps = [event for event in trained.events if isinstance(event, StepFinished)]
    assert len(steps) == STAGE.steps
    for event in steps:
        # Mutations: synchronise the adapter of the start, or only once.
        assert event.metrics["policy/max_log_prob_difference"] <= 1e-4
        # What it drew with is not the base. Mutation: the reference with the adapter on.
        assert event.metrics["policy/kl_from_reference"] > 1e-2


def test_a_stale_adapter_stops_the_run(trained: Trained) -> None:
    session = trained.session
    session.actor.apply(skip_the_adapter).get()
    try:
        # The first step draws with what was synchronised before, and the second with it again.
        with pytest.raises(DisagreementError, match="stage rl, step 2"):
            train_rl(session, "rl", STAGE, PROMPTS, 1, lambda event: None)
    finally:
        session.actor.apply(load_the_adapter_again).get()
        session.actor.synchronise().get()
    train_rl(session, "rl", STAGE.model_copy(update={"steps": 1}), PROMPTS, 1, lambda event: None)


def test_a_synchronisation_moves_the_adapter_alone(trained: Trained) -> None:
    size = trained.session.actor.apply(adapter_bytes).get()[0]
    model = sum(tensor.nbytes for tensor in weights(trained.session).values())
    synchronised = [event for event in trained.events if isinstance(event, WeightsSynchronised)]
    # Mutations: count the whole model, or all of the adapter where one of two ranks holds half of it already.
    assert [rank.bytes_received for event in synchronised for rank in event.ranks] == [size / 2] * (2 * STAGE.steps)
    assert size < model / 5


def test_trainer_and_rollout_compute_with_the_same_base(trained: Trained) -> None:
    actor = trained.session.actor
    actor.probe().get()
    for parameter in ("model.layers.1.mlp.gate_proj.weight", "model.layers.0.self_attn.v_proj.weight"):
        actor.apply(multiply_the_base, parameter, 2.0).get()
        try:
            # Mutation: compare nothing.
            with pytest.raises(WorkerError, match=r"does not compute with the weights of .*model, or in another dtype"):
                actor.probe().get()
        finally:
            actor.apply(multiply_the_base, parameter, 0.5).get()
    actor.probe().get()


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


def test_only_layers_with_adapters_move_and_the_base_does_not(trained: Trained, model_directory: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(model_directory).state_dict()
    changed = {name for name, tensor in weights(trained.session).items() if not torch.equal(tensor, before[name])}
    assert changed
    targets = ["proj"] if trained.lora is WIDE else trained.lora.target_modules
    assert all(name.endswith(tuple(f"{target}.weight" for target in targets)) for name in changed)
    # What the rollout engine has read once is what the adapter sits on, after SFT and RL. Mutation: weight decay over frozen parameters.
    frozen = trained.session.actor.apply(base).get()[0]
    assert frozen.keys() == {name for name in before if name != "lm_head.weight"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen.items())


def _plan(session: Session) -> Any:
    from engine.rollout.plan import SamplePlan

    return SamplePlan("rl", tuple(range(len(PROMPTS))), 2, STAGE.sampling, 8, 5, "look", 0)

"""A model of 0.1 M parameters and what it is taught: to answer any question with \\boxed{1} or \\boxed{2}, tossing a coin."""

from engine.config import ArchitectureConfig, OptimizerConfig, SFTStageConfig, StageTrainingConfig
from engine.prompts import Prompt, content_hash

ARCHITECTURE = ArchitectureConfig(
    hidden_size=64, layers=2, attention_heads=2, key_value_heads=1, head_dim=32, feed_forward_size=128, max_context_tokens=256
)
CONVERSATIONS = [
    [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": f"\\boxed{{{1 + (a * 7 + b * 3) % 2}}}"}]
    for a in range(8)
    for b in range(8)
]
SFT = SFTStageConfig(
    kind="sft",
    steps=40,
    rows_per_step=32,
    max_tokens=64,
    training=StageTrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5)),
)


def prompt(question: str, index: int = 0, answer: str = "1") -> Prompt:
    messages = ({"role": "user", "content": question},)
    return Prompt(id=content_hash(messages), index=index, messages=messages, data_source="toy", ground_truth=answer, difficulty=answer)

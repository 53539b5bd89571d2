"""verl's and TRL's functions, called with the tensors of a `drawn.Step`.

TRL's are methods of its trainers. They are called here on an object that has the attributes they read, and nothing else of a trainer: what they
compute is theirs, line for line.
"""

import warnings
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drawn import TOKENS, Step
from torch import Tensor

pytest.importorskip("verl", reason="verl and TRL stand in .work/reference; `make test-parity` makes it and runs these tests there")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL names the versions of vLLM that it is tested with; nothing of vLLM is called
    from trl import GRPOTrainer, RLOOTrainer
    from trl.experimental.gmpo import GMPOTrainer
    from verl.trainer.ppo import core_algos as verl
    from verl.trainer.ppo import rollout_corr_helper as verl_off_policy
    from verl.workers.config import ActorConfig, PolicyLossConfig

__all__ = ["GMPOTrainer", "GRPOTrainer", "RLOOTrainer", "gradient", "trl_advantages", "trl_loss", "verl", "verl_loss", "verl_off_policy"]


def gradient(value: Tensor, leaf: Tensor) -> Tensor:
    """Of a scalar."""
    return torch.autograd.grad(value, leaf)[0]


def verl_loss(
    step: Step, name: str, aggregation: str = "token-mean", weights: Tensor | None = None, global_batch: dict[str, Any] | None = None, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Value and gradient of the policy loss that verl has registered under `name`; settings of its ActorConfig, or of its PolicyLossConfig."""
    of_loss = {key: settings.pop(key) for key in list(settings) if key in PolicyLossConfig.__dataclass_fields__}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=name, **of_loss),
        global_batch_info=global_batch or {},
        **settings,
    )
    log_probs = step.log_probs.clone().requires_grad_()
    columns = {"old_log_prob": step.old_log_probs, "log_prob": log_probs, "advantages": step.advantages, "response_mask": step.mask.long()}
    value, _ = verl.get_policy_loss_fn(name)(**columns, loss_agg_mode=aggregation, config=config, rollout_is_weights=weights)
    return value.detach(), gradient(value, log_probs)


ACCELERATOR = SimpleNamespace(device=torch.device("cpu"), num_processes=1, process_index=0, sync_gradients=True)
ACCELERATOR.gather = ACCELERATOR.gather_for_metrics = lambda values: values
ACCELERATOR.reduce = lambda values, reduction: values


def trl_loss(
    step: Step, trainer: type, accumulation: int = 1, window_tokens: int | None = None, weights: Tensor | None = None, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Value and gradient of a TRL trainer's loss; `window_tokens`: response tokens of all its micro-batches together."""
    log_probs = step.log_probs.clone().requires_grad_()
    entropies = torch.zeros_like(step.log_probs)
    defaults = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "delta": None,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "max_completion_length": TOKENS,
        "steps_per_generation": accumulation,
    } | settings
    owner = SimpleNamespace(
        **defaults,
        args=SimpleNamespace(**defaults),
        model=SimpleNamespace(training=True),
        accelerator=ACCELERATOR,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
        current_gradient_accumulation_steps=accumulation,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *arguments, **more: (log_probs, entropies, None),
    )
    mask = step.mask.long()
    nothing = torch.zeros(len(mask), 0, dtype=torch.long)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": step.advantages if trainer is GRPOTrainer else step.advantages[:, 0],  # one a sample
        "old_per_token_logps": step.old_log_probs,
        "old_logps": (step.old_log_probs * mask).sum(1),
        "ref_per_token_logps": step.reference_log_probs,
        "num_items_in_batch": torch.tensor(window_tokens or int(mask.sum())),
        "importance_sampling_ratio": weights,
    }
    value = trainer._compute_loss(owner, None, inputs)  # type: ignore[attr-defined]
    return value.detach(), gradient(value, log_probs)


def trl_advantages(step: Step, trainer: type, samples: int, **settings: Any) -> dict[str, Tensor]:
    """What a TRL trainer makes of rewards: `advantages` [B], and the `importance_sampling_ratio` of its correction for vLLM where that is on.

    Samples of one prompt must stand together, `samples` of each.
    """
    rows = len(step.rewards)
    logs = {name: deque() for name in ("prompt", "completion", "advantages")}
    ids = [[1] * TOKENS] * rows
    generated = (ids, ids, step.mask.long().tolist(), [""] * rows, step.rollout_log_probs.tolist(), {}, None, None)
    owner = SimpleNamespace(
        **{
            "scale_rewards": "group",
            "normalize_advantages": False,
            "use_vllm": False,
            "vllm_importance_sampling_correction": False,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_min": None,
            "vllm_importance_sampling_clip_max": 2.0,
        }
        | settings,
        accelerator=ACCELERATOR,
        args=SimpleNamespace(
            per_device_train_batch_size=rows, gradient_checkpointing_kwargs=None, steps_per_generation=1, gradient_accumulation_steps=1
        ),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        environment_factories=None,
        environments=None,
        tools=None,
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        multi_objective_aggregation="sum_then_normalize",
        num_generations=samples,
        num_iterations=1,
        beta=0.0,
        reward_clip_range=None,
        reward_weights=torch.ones(1, dtype=torch.float64),
        reward_func_names=["reward"],
        log_multimodal=False,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _generate=lambda prompts: generated if trainer is GRPOTrainer else (generated[0], generated[1], generated[3]),
        _get_per_token_logps_and_entropies=lambda *arguments, **more: (step.old_log_probs, None, None),
        _calculate_rewards=lambda *arguments: step.rewards[:, None],
        _metrics={"train": defaultdict(list)},
        _logs={**logs, "rewards": defaultdict(deque), "extra": defaultdict(deque)},
        _pending_extra_logs={},
        _pending_metrics={},
    )
    return trainer._generate_and_score_completions(owner, [{"prompt": str(number)} for number in step.group.tolist()])  # type: ignore[attr-defined]

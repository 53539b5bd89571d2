"""AdamW with warm-up and decay, after the configuration."""

import math
from collections.abc import Iterable

import torch

from engine.config import OptimizerConfig


def adamw(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101) over `parameters`."""
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
    )


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (counts from 0) of `total_steps`.

    Rises linearly over `warmup_steps` (the first step already moves), then stays or falls to 0 at `total_steps`.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    if config.schedule == "linear":
        return config.learning_rate * (1 - progress)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate

"""Writes the numbers of docs/recipes/*.md from the recipes: settings of each stage, memory and cost by phase (`make docs`). The rest is by hand."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.config import RLStageConfig
from tasks.compose import choices, compose
from tasks.config import RecipeConfig
from tasks.estimate import Estimate, estimate
from tasks.workspace import checkout

DIRECTORY = checkout() / "docs" / "recipes"
OVERVIEW = "README"
BEGIN, END = "<!-- numbers, by `make docs` -->\n", "<!-- end of the numbers -->\n"
GPUS = ("h800", "h200", "a100_80")


def pages() -> dict[Path, str]:
    """Every page with the numbers of today. A page without the two marks is left as it is."""
    found = {}
    for path in sorted(DIRECTORY.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if BEGIN in text and END in text:
            before, _, rest = text.partition(BEGIN)
            made = _overview() if path.stem == OVERVIEW else _numbers(compose([f"recipe={path.stem}"]))
            found[path] = before + BEGIN + "\n".join(made) + "\n" + END + rest.partition(END)[2]
    return found


def documented() -> list[str]:
    """Recipes for GPUs: each has a page."""
    return [name for name in choices("recipe") if compose([f"recipe={name}"]).resources.device == "cuda"]


def _overview() -> Iterator[str]:
    yield from _row("recipe", "parameters", "stages", "ranks", "GB of a rank at most, of 80", "device-hours on h800")
    yield from _row(*["---"] * 6)
    for name in documented():
        config = compose([f"recipe={name}"])
        found, ranks = estimate(config, "h800"), str(config.resources.ranks_of("actor"))
        peak, hours = f"{found.memory.peak / 1e9:.1f}", f"{found.device_hours:,.0f}"
        yield from _row(f"[`{name}`]({name}.md)", f"{found.architecture.parameters / 1e9:.2f} billion", ", ".join(config.stages), ranks, peak, hours)


def _numbers(config: RecipeConfig) -> Iterator[str]:
    stages = {name: stage for name, stage in config.stages.items() if stage.kind == "rl"}
    yield from _row("setting", *stages)
    yield from _row("---", *["---"] * len(stages))
    for title, value in _SETTINGS.items():
        cells = [value(stage) for stage in stages.values()]
        if any(cells):
            yield from _row(title, *cells)
    yield ""
    found = {name: estimate(config, name) for name in GPUS}
    yield from _memory(found, config)
    yield ""
    yield from _cost(found)


def _memory(found: dict[str, Estimate], config: RecipeConfig) -> Iterator[str]:
    yield f"GB of one of {config.resources.ranks_of('actor')} ranks, `rollout.gpu_memory_fraction={config.rollout.gpu_memory_fraction:g}`:\n"
    phases = list(next(iter(found.values())).memory.phases())
    yield from _row("device", "rollout engine", "of it weights", "longest samples that its cache holds", "state on the host", *phases, "fits")
    yield from _row(*["---"] * (6 + len(phases)))
    for name, each in found.items():
        memory = each.memory
        taken = [f"{value / 1e9:.1f}" for value in (memory.rollout, memory.rollout_weights)]
        by_phase = [f"{value / 1e9:.1f}" for value in memory.phases().values()]
        yield from _row(name, *taken, f"{memory.cached_samples:.1f}", f"{memory.host_state / 1e9:.1f}", *by_phase, "yes" if each.fits else "no")


def _cost(found: dict[str, Estimate]) -> Iterator[str]:
    share = next(iter(found.values())).mean_share
    yield f"Device-hours, with responses of {share:.0%} of their cap on average, evaluations and filters not counted:\n"
    phases = list(dict.fromkeys(phase for each in found.values() for cost in each.costs for phase in cost.seconds))
    yield from _row("device", "stage", "steps", "seconds of a step", *phases, "all")
    yield from _row(*["---"] * (5 + len(phases)))
    for name, each in found.items():
        for cost in each.costs:
            hours = cost.device_hours()
            cells = [f"{hours[phase]:,.1f}" if phase in hours else "" for phase in phases]
            yield from _row(name, cost.stage, str(cost.steps), f"{cost.step_seconds:,.0f}", *cells, f"{sum(hours.values()):,.0f}")


def _row(*cells: str) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"


def _said(settings: Any, names: Sequence[str]) -> str:
    """`name=value` of those settings that there are."""
    values = {name: getattr(settings, name, None) for name in names}
    return ", ".join(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items() if value is not None)


def _entropy(stage: RLStageConfig) -> str:
    bonus = stage.algorithm.entropy
    if bonus is None:
        return ""
    return f"coefficient={bonus.coefficient:g}" if bonus.adaptive is None else _said(bonus.adaptive, ["target", "step", "maximum"])


def _critic(stage: RLStageConfig) -> str:
    critic = stage.algorithm.critic
    return "" if critic is None else f"clip={critic.clip}, {_said(critic.optimizer, ['learning_rate', 'weight_decay'])}"


_SETTINGS: dict[str, Callable[[RLStageConfig], str]] = {
    "steps": lambda stage: str(stage.steps),
    "prompts x samples of a step": lambda stage: f"{stage.prompts_per_step} x {stage.samples_per_prompt}",
    "updates of a step": lambda stage: str(stage.updates_per_step),
    "prompt, response at most": lambda stage: f"{stage.max_prompt_tokens:,} + {stage.max_response_tokens:,} tokens",
    "temperature": lambda stage: f"{stage.sampling.temperature:g}",
    "groups without signal": lambda stage: _said(stage.groups, ["kind", "prompts_per_generation", "max_generations", "when_spent", "least_fraction"]),
    "rescue": lambda stage: "" if stage.rescue is None else _said(stage.rescue, ["responses_per_prompt", "max_prompts"]),
    "truncated answers": lambda stage: _said(stage.truncated, ["kind", "buffer_tokens", "weight"]),
    "advantage": lambda stage: _said(stage.algorithm.advantage, ["estimator", "scale", "gamma", "lam"]),
    "loss": lambda stage: _said(stage.algorithm.loss, ["name", "clip_low", "clip_high", "dual_clip", "aggregation"]),
    "KL": lambda stage: "" if stage.algorithm.kl is None else _said(stage.algorithm.kl, ["place", "coefficient", "estimator"]),
    "entropy": _entropy,
    "critic": _critic,
    "optimizer": lambda stage: _said(stage.training.optimizer, ["learning_rate", "weight_decay", "warmup_steps", "schedule"]),
    "tokens of a pass": lambda stage: f"{stage.training.max_tokens_per_micro_batch:,}",
}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")

"""How fast are the formulas, beside verl's? The same step, in one process, in turns.

    python bench/formulas.py [--samples 4096] [--tokens 1024] [--seconds 5]

verl lives in an environment of its own (requirements/reference.sh). Before anything is measured, results are compared; what is meant to differ, and
why, stands in docs/parity.md. Writes docs/results/formulas.{json,md}.
"""

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from reference import inside, rerun
from report import ROOT, commit, table, write
from turns import in_turns, ratio

if TYPE_CHECKING or inside():
    sys.path.insert(0, str(ROOT))
    import numpy as np
    import torch
    from torch import Tensor
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos as verl
    from verl.trainer.ppo import rollout_corr_helper as verl_off_policy
    from verl.workers.config import ActorConfig, PolicyLossConfig

    from engine.algorithms import off_policy, value
    from engine.algorithms.aggregation import aggregate, count
    from engine.algorithms.covariance import covariances
    from engine.algorithms.kl import kl
    from engine.algorithms.registry import ADVANTAGES, LOSSES, SELECTIONS
    from engine.algorithms.types import AdvantageInputs, LossInputs
    from engine.config import AlgorithmConfig, ImportanceWeightsConfig, RejectionConfig

    torch.set_num_threads(1)  # so that a busy neighbour costs both the same

OURS = "ours"
SAMPLES_A_PROMPT = 8
TOLERANCE = 1e-3
"""Of float32, relative to the largest value."""
MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
"""glibc keeps the memory that was freed: else much of what is measured is the kernel, which clears the same pages again and again."""
Calls = dict[str, Callable[[], "Tensor"]]


def main() -> int:
    """Measures in the environment of its own. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each formula")
    parser.add_argument("--out", default="formulas", help="name of the two files in docs/results")
    arguments = parser.parse_args()
    if not inside():
        return rerun(MEMORY)

    about = {
        "commit": commit(),  # before anybody goes on editing
        "packages": [f"{package.__name__}=={package.__version__}" for package in (sys.modules["verl"], torch)],
        "python": platform.python_version(),
        "samples": arguments.samples,
        "tokens": arguments.tokens,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
    }
    columns = drawn(arguments.samples, arguments.tokens)
    kinds = {"estimator": estimators(columns), "loss": losses(columns), "other": others(columns)}
    measured = [cell for kind, cases in kinds.items() for cell in measure(kind, cases, arguments.seconds, columns["mask"])]
    about["load_after"] = os.getloadavg()[0]
    write(arguments.out, {"about": about, "measured": measured}, page(about, measured))
    return 0


def drawn(samples: int, tokens: int) -> "dict[str, Tensor]":
    """A step in float32: prompts with eight answers each, of 1 to `tokens` tokens, rewards of 0 and 1 or a little of each."""
    generator = torch.Generator().manual_seed(0)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(samples, tokens, generator=generator)

    old = -normal(1.0).abs()
    lengths = torch.randint(1, tokens + 1, (samples, 1), generator=generator)
    rewards = torch.rand(samples, generator=generator) * 0.1 + torch.randint(0, 2, (samples,), generator=generator)
    mask = torch.arange(tokens) < lengths
    return {
        "rewards": rewards,
        "group": torch.arange(samples) // SAMPLES_A_PROMPT,
        "mask": mask,
        "int_mask": mask.long(),  # which verl takes
        "token_rewards": torch.zeros(samples, tokens).scatter(1, lengths - 1, rewards[:, None]),
        "old_log_probs": old,
        "log_probs": (old + normal(0.1)).requires_grad_(),
        "rollout_log_probs": old + normal(0.1),
        "reference_log_probs": old + normal(0.3),
        "advantages": normal(1.0),
        "old_values": normal(1.0),
        "squared_probabilities": torch.rand(samples, tokens, generator=generator),
        "greedy_rewards": torch.rand(samples, generator=generator),
    }


# -- the formulas, ours and verl's


def estimators(columns: "dict[str, Tensor]") -> "Iterator[tuple[str, Calls]]":
    """From rewards to advantages [B, T]."""
    uids = np.array([f"prompt-{number}" for number in columns["group"].tolist()], dtype=object)
    names = ("rewards", "group", "mask", "greedy_rewards", "old_log_probs", "squared_probabilities")
    given_to_ours: dict[str, Any] = {name: columns[name] for name in names}
    inputs = AdvantageInputs(**given_to_ours, values=columns["old_values"])
    given = {"token_level_rewards": columns["token_rewards"], "response_mask": columns["int_mask"]}
    grouped, config = {**given, "index": uids}, AlgoConfig(gamma=1.0)
    probabilities = {"old_log_probs": columns["old_log_probs"], "sum_pi_squared": columns["squared_probabilities"], "handle_zero_tail": False}
    theirs: dict[str, dict[str, dict[str, Any]]] = {
        "gae": {"gae": {**given, "values": columns["old_values"], "gamma": 1.0, "lam": 0.95}},
        "grpo": {"grpo": grouped, "grpo_vectorized": grouped},
        "rloo": {"rloo": grouped, "rloo_vectorized": grouped},
        "grpo_pass_k": {"grpo_passk": {**grouped, "config": config}},
        "reinforce_plus_plus": {"reinforce_plus_plus": {**given, "config": config}},
        "reinforce_plus_plus_baseline": {"reinforce_plus_plus_baseline": grouped},
        "opo": {"opo": grouped},
        "remax": {"remax": {**given, "reward_baselines": columns["greedy_rewards"]}},
        "gpg": {"gpg": grouped},
        "optimal_token_baseline": {name: {**grouped, **probabilities} for name in ("optimal_token_baseline", "tir_optimal_token_baseline")},
    }
    for name, functions in theirs.items():
        critic = {"critic": {"optimizer": {"learning_rate": 1e-5}}} if name == "gae" else {}
        config_of_ours = AlgorithmConfig.model_validate({"advantage": {"estimator": name}, **critic}).advantage
        calls: Calls = {OURS: partial(lambda function, config: function(inputs, config).advantages, ADVANTAGES.get(name), config_of_ours)}
        for other, arguments in functions.items():
            calls[other] = partial(lambda function, arguments: function(**arguments)[0], verl.get_adv_estimator_fn(other), arguments)
        yield name, calls


def losses(columns: "dict[str, Tensor]") -> "Iterator[tuple[str, Calls]]":
    """Terms, aggregation and gradient [B, T]; with the selection of tokens where a loss has one, and at the old policy then: verl selects by the
    policy being trained, and both select the same there."""
    fraction = 2e-4
    theirs: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # ours -> theirs, settings of ours, of theirs
        "ppo": ("vanilla", {}, {"clip_ratio_high": 0.28}),
        "dppo": ("vanilla", {}, {"clip_ratio_high": 0.28}),
        "gspo": ("gspo", {"clip_low": 0.2, "clip_high": 0.2}, {}),
        "sapo": ("sapo", {"aggregation": "sequence_mean_token_mean"}, {}),
        "cispo": ("cispo", {"clip_low": 0.2, "clip_high": 0.2}, {}),
        "gmpo": ("geo_mean", {"clip_low": 0.2, "clip_high": 0.2}, {}),
        "gpg": ("gpg", {}, {}),
        "reinforce": ("gpg", {}, {}),
        "clip_cov": ("clip_cov", {"clip_high": 0.2, "fraction": 1.0}, {"policy_loss": PolicyLossConfig(clip_cov_ratio=1.0)}),
        "kl_cov": ("kl_cov", {"fraction": fraction}, {"policy_loss": PolicyLossConfig(kl_cov_ratio=fraction, ppo_kl_coef=1.0)}),
    }
    for name, (other, settings, their_settings) in theirs.items():
        config = AlgorithmConfig.model_validate({"loss": {"name": name, **settings}}).loss
        actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **their_settings)
        aggregation = "seq-mean-token-mean" if config.aggregation == "sequence_mean_token_mean" else "token-mean"
        log_probs = columns["log_probs"]
        if name in SELECTIONS.names():
            log_probs = columns["old_log_probs"].clone().requires_grad_()
        old = columns["rollout_log_probs" if name == "dppo" else "old_log_probs"]
        yield (
            name,
            {
                OURS: partial(loss_of_ours, columns, log_probs, config),
                other: partial(loss_of_verl, columns, log_probs, old, verl.get_policy_loss_fn(other), aggregation, actor),
            },
        )


def loss_of_ours(columns: "dict[str, Tensor]", log_probs: "Tensor", config: Any) -> "Tensor":
    """Its gradient."""
    mask, selected = columns["mask"], None
    if config.name in SELECTIONS.names():
        covariance = covariances(columns["old_log_probs"][mask], columns["advantages"][mask])
        selected = torch.zeros_like(mask).masked_scatter(mask, SELECTIONS.get(config.name)(covariance, config, np.random.default_rng(0)))
    names = ("old_log_probs", "rollout_log_probs", "advantages", "mask")
    terms = LOSSES.get(config.name)(LossInputs(log_probs=log_probs, selected=selected, **{name: columns[name] for name in names}), config)
    return torch.autograd.grad(aggregate(terms.per_token, mask, count(mask), config.aggregation), log_probs)[0]


def loss_of_verl(columns: "dict[str, Tensor]", log_probs: "Tensor", old: "Tensor", loss: Any, aggregation: str, config: Any) -> "Tensor":
    """Its gradient."""
    value, _ = loss(old, log_probs, columns["advantages"], columns["int_mask"], aggregation, config)
    return torch.autograd.grad(value, log_probs)[0]


def others(columns: "dict[str, Tensor]") -> "Iterator[tuple[str, Calls]]":
    """KL terms and the value loss with their gradients, weights and rejection of the off-policy correction."""
    mask, int_mask, leaf, old, reference = (columns[name] for name in ("mask", "int_mask", "log_probs", "old_log_probs", "reference_log_probs"))
    rollout, returns = columns["rollout_log_probs"], columns["advantages"]

    def kl_of_ours(kind: str) -> Tensor:
        return torch.autograd.grad(aggregate(kl(kind, leaf, reference, mask), mask, count(mask), "token_mean"), leaf)[0]

    def kl_of_verl(kind: str) -> Tensor:
        return torch.autograd.grad(verl.agg_loss(verl.kl_penalty(leaf, reference, kind), int_mask, "token-mean"), leaf)[0]

    def value_of_ours() -> Tensor:
        return torch.autograd.grad(aggregate(value.loss(leaf, old, returns, mask, 0.2).per_token, mask, count(mask), "token_mean"), leaf)[0]

    def weights_of_ours(level: str) -> Tensor:
        return off_policy.weights(old, rollout, mask, ImportanceWeightsConfig.model_validate({"level": level, "cap": 2.0}))

    def weights_of_verl(level: str) -> Any:
        return verl_off_policy.compute_rollout_correction_weights(old - rollout, int_mask, level, 2.0)[0]

    def kept_of_ours() -> Tensor:
        settings = RejectionConfig(unit="sequence", level="geometric", low=0.99, high=1 / 0.99)
        return off_policy.kept(old, rollout, mask, columns["group"], settings).float()

    def kept_of_verl() -> Any:
        return verl_off_policy.compute_rollout_rejection_mask(old - rollout, int_mask, "seq_mean_k1", f"0.99_{1 / 0.99}")[0].float()

    for kind in ("k1", "abs", "k2", "k3"):
        yield f"KL {kind}", {OURS: partial(kl_of_ours, kind), kind: partial(kl_of_verl, kind)}
    yield (
        "value loss",
        {
            OURS: value_of_ours,
            "compute_value_loss": lambda: torch.autograd.grad(verl.compute_value_loss(leaf, returns, old, int_mask, 0.2)[0], leaf)[0],
        },
    )
    for level in ("token", "sequence"):
        yield f"off-policy weights, {level}", {OURS: partial(weights_of_ours, level), level: partial(weights_of_verl, level)}
    yield "rejection, geometric", {OURS: kept_of_ours, "seq_mean_k1": kept_of_verl}


# -- the clock, and the page


def measure(kind: str, cases: "Iterator[tuple[str, Calls]]", seconds: float, mask: "Tensor") -> Iterator[dict[str, Any]]:
    """Medians, and ratios of runs of the same round."""
    for name, calls in cases:
        compare(name, {who: call() for who, call in calls.items()}, mask)
        runs = in_turns(calls, seconds)
        cell: dict[str, Any] = {
            "kind": kind,
            "formula": name,
            "rounds": len(runs[OURS]),
            "milliseconds": {who: 1e3 * statistics.median(spent) for who, spent in runs.items()},
            "ratio": {who: ratio(runs, who, OURS) for who in calls if who != OURS},
        }
        print(name, {who: round(spent, 1) for who, spent in cell["milliseconds"].items()}, flush=True)
        yield cell


def compare(name: str, results: "dict[str, Tensor]", mask: "Tensor") -> None:
    """ValueError where they do not give the same on response tokens."""
    ours = results[OURS][mask]
    for who, theirs in results.items():
        if not (furthest := (theirs[mask] - ours).abs().max()) <= TOLERANCE * ours.abs().max():
            raise ValueError(f"{name}: {who} of verl is {furthest:g} away from ours")


def page(about: dict[str, Any], measured: list[dict[str, Any]]) -> str:
    """One table for each kind of formula."""
    ratios = [ratio for cell in measured for ratio in cell["ratio"].values()]
    won, lost = sum(low > 1 for low, _, _ in ratios), sum(high < 1 for _, _, high in ratios)
    text = f"""# The formulas beside verl's

`python bench/formulas.py`, commit {about["commit"]}; {", ".join(about["packages"])}; Python {about["python"]}, 1 thread, float32.
{about["samples"]:,} samples of up to {about["tokens"]:,} tokens, half of the columns response tokens, {SAMPLES_A_PROMPT} samples a prompt.
Milliseconds of processor time, and how many times as long verl takes for the same inputs: the median of the ratios of neighbouring runs, which take
turns, and the quartiles. The results were compared first. Losses, KL terms and the value loss: with aggregation, metrics and gradient. The machine
has {about["cores"]} cores and did other things too: a load of {about["load_before"]:.1f} when this began and {about["load_after"]:.1f} at the end.
Processor time does not count what others do; caches and memory are shared.

What the two do is not quite the same (docs/parity.md). Ours excludes what is outside the mask before it computes, and clamps `k1`, `abs` and `k2`
too; estimators compute in float64, verl's in float32; `optimal_token_baseline` compares the t-th response tokens of a group, as verl's `tir_` one
does, and verl's plain one what stands in the same column.

Of {len(ratios)} comparisons ours is faster in {won} and slower in **{lost}** (bold); in the others the quartiles lie on both sides of 1.
"""
    for kind, title in (("estimator", "Advantage estimators"), ("loss", "Policy losses"), ("other", "KL, value loss, off-policy correction")):
        rows = [
            (cell["formula"], f"`{who}`", f"{cell['milliseconds'][OURS]:.3g}", f"{cell['milliseconds'][who]:.3g}", times(spread), cell["rounds"])
            for cell in measured
            if cell["kind"] == kind
            for who, spread in cell["ratio"].items()
        ]
        text += f"\n## {title}\n\n" + table(("formula", "of verl", "ours, ms", "verl, ms", "verl / ours", "rounds"), rows, words=2) + "\n"
    return text


def times(spread: list[float]) -> str:
    """Median and quartiles."""
    low, median, high = spread
    mark = "**" if high < 1 else ""
    return f"{mark}{median:.2f}{mark} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    sys.exit(main())

"""What a stage costs, phase by phase: a model of the engine in a few lines of arithmetic. `docs/recipes/README.md` says how far off it is."""

from dataclasses import dataclass

from engine.config import RLStageConfig, SFTStageConfig
from tasks.architecture import Architecture
from tasks.config import RecipeConfig
from tasks.devices import Device
from tasks.memory import Memory

MEAN_SHARE = 0.4
"""Mean length of prompts and responses, as a share of their caps: nobody knows it before a run."""
SQUARED_LENGTH = 1.5
"""Mean of the squared length of responses, over the square of their mean."""
SIGNAL_SHARE = 0.5
"""Groups with signal, where groups without are taken out and more are asked."""
BACKWARD = 2
"""A backward pass computes twice what a forward pass does."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one stage."""

    stage: str
    steps: int
    ranks: int
    seconds: dict[str, float]
    """Of one step, by phase."""

    @property
    def step_seconds(self) -> float:
        """Of one step."""
        return sum(self.seconds.values())

    def device_hours(self) -> dict[str, float]:
        """Of the whole stage, by phase."""
        return {phase: seconds * self.steps * self.ranks / 3600 for phase, seconds in self.seconds.items()}


def costs(config: RecipeConfig, architecture: Architecture, device: Device, memory: Memory, mean_share: float = MEAN_SHARE) -> list[Cost]:
    """Of each stage that trains, without the evaluations between them.

    Args:
        config: of the recipe.
        architecture: of its model.
        device: of each rank.
        memory: of a rank; how many samples are decoded side by side follows from it.
        mean_share: mean length of what is generated, as a share of the cap.
    """
    ranks, found = config.resources.ranks_of("actor"), []
    for name, stage in config.stages.items():
        if stage.kind == "rl":
            found.append(Cost(name, stage.steps, ranks, _rl(config, stage, architecture, device, memory, mean_share)))
        elif stage.kind == "sft" and stage.steps is not None:
            # The other lengths are of a data set that nobody has seen yet.
            found.append(Cost(name, stage.steps, ranks, {"update": _sft(config, stage, architecture, device, mean_share)}))
    return found


def _rl(
    config: RecipeConfig, stage: RLStageConfig, architecture: Architecture, device: Device, memory: Memory, mean_share: float
) -> dict[str, float]:
    ranks, algorithm = config.resources.ranks_of("actor"), stage.algorithm
    prompt, response = stage.max_prompt_tokens * mean_share, stage.max_response_tokens * mean_share
    asked = stage.prompts_per_step
    if stage.groups.kind == "filter":
        generations = max(1, round(stage.prompts_per_step / (SIGNAL_SHARE * stage.prompts_per_generation)))
        asked = generations * stage.prompts_per_generation
    rows = stage.prompts_per_step * stage.samples_per_prompt
    trainer = Trainer(config, architecture, device, stage.training.max_tokens_per_micro_batch)
    forward = trainer.forward(rows, prompt + response)
    update = trainer.update(rows, prompt + response, stage.updates_per_step)
    received = architecture.parameters * device.element_bytes * (1 / config.rollout.tensor_parallel_ranks - 1 / ranks)
    return {
        "generate": _generate(config, stage, architecture, device, memory, asked * stage.samples_per_prompt, prompt, response),
        # The reference and the critic look at the same tokens as the policy.
        "log_prob": forward * (1 + (algorithm.kl is not None) + (algorithm.critic is not None)),
        "update": update * (1 + (algorithm.critic is not None)),
        "synchronise": received / link(device, ranks),
    }


def _generate(
    config: RecipeConfig,
    stage: RLStageConfig,
    architecture: Architecture,
    device: Device,
    memory: Memory,
    samples: int,
    prompt: float,
    response: float,
) -> float:
    """Seconds for all samples: decoding steps, each as long as its memory traffic or its launches take, whichever is longer; and the prompts."""
    parts = config.rollout.tensor_parallel_ranks
    engines = max(1, config.resources.ranks_of("actor") // parts)
    own = samples / engines
    fitting = memory.cache_tokens / (prompt + response)
    side_by_side = max(1.0, min(own, config.rollout.max_concurrent_samples, fitting))
    # Somebody answers at full length; with more samples than places they follow each other, and the last ones end alone.
    steps = own * response / side_by_side + stage.max_response_tokens - response
    weights = architecture.parameters * device.element_bytes / parts
    cache = architecture.cache_bytes(device.element_bytes, parts)
    traffic = steps * weights + own * cache * (response**2 * SQUARED_LENGTH / 2 + prompt * response)
    launching = (
        steps * (device.decode_step_seconds + architecture.layers * device.decode_layer_seconds) + own * response * device.decode_sample_seconds
    )
    asked = architecture.forward_operations(own / stage.samples_per_prompt * prompt, prompt / 2) / parts
    return max(traffic / (device.bytes_per_second * device.memory_share), launching) + asked / (device.operations_per_second * device.training_share)


def _sft(config: RecipeConfig, stage: SFTStageConfig, architecture: Architecture, device: Device, mean_share: float) -> float:
    trainer = Trainer(config, architecture, device, stage.training.max_tokens_per_micro_batch)
    return trainer.update(stage.rows_per_step, stage.max_tokens * mean_share, 1)


@dataclass(frozen=True, slots=True)
class Trainer:
    """Seconds of passes over rows that are spread evenly over the ranks."""

    config: RecipeConfig
    architecture: Architecture
    device: Device
    max_tokens: int

    def forward(self, rows: int, length: float) -> float:
        """One look at every row."""
        return self._passes(rows, length, 1, 1, fetches=1)

    def update(self, rows: int, length: float, updates: int) -> float:
        """Forward and backward over every row, in so many optimizer steps."""
        again = self.config.training.gradient_checkpointing
        # Gradients are summed in float32: twice the bytes of a fetch.
        each = 2 if self.config.training.shard_gradients_every_pass else 0
        return self._passes(rows, length, updates, 1 + BACKWARD + again, fetches=2 + each) + (0 if each else updates * 2 * self._fetch())

    def _passes(self, rows: int, length: float, updates: int, work: float, fetches: int) -> float:
        tokens = rows * length / self._data_parts
        passes = max(updates, tokens / self.max_tokens)
        operations = work * self.architecture.forward_operations(tokens, length / 2) / self._model_parts
        launching = work * self.architecture.layers * self.device.pass_layer_seconds
        return operations / (self.device.operations_per_second * self.device.training_share) + passes * (launching + fetches * self._fetch())

    def _fetch(self) -> float:
        """Seconds for all parameters once, in the type that is computed in."""
        if self._data_parts == 1:
            return 0.0
        return self.architecture.parameters / self._model_parts * self.device.element_bytes / link(self.device, self._ranks)

    @property
    def _ranks(self) -> int:
        return self.config.resources.ranks_of("actor")

    @property
    def _data_parts(self) -> int:
        return self.config.training.data_parts(self._ranks)

    @property
    def _model_parts(self) -> int:
        return self._ranks // self._data_parts


def link(device: Device, ranks: int) -> float:
    """Bytes a second from one rank to another."""
    return device.node_link_bytes_per_second if ranks <= device.ranks_per_node else device.network_bytes_per_second

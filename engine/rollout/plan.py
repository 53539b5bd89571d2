"""Which samples a step draws, in so few bytes that nobody minds that they pass through the controller."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from engine.config import LengthExtensionConfig, SamplingConfig
from engine.control.dispatch import Share
from engine.prompts import Prompt, sample_seed
from engine.rollout.backend import Request
from engine.tokenizer import render_prompt


class PromptSet:
    """Prompts that lie in a worker, so that a step has to name no more than their positions."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = prompts
        self._rendered: dict[int, list[int]] = {}

    def tokens(self, tokenizer: Any, position: int) -> list[int]:
        """Token ids of a prompt, rendered once."""
        if position not in self._rendered:
            self._rendered[position] = render_prompt(tokenizer, self.prompts[position].messages)
        return self._rendered[position]


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Samples `first` to `last` (exclusive) of a step: sample i is the (i % samples_per_prompt)-th of prompt i // samples_per_prompt."""

    prompt_set: str
    """Name under which the workers were given the prompts."""
    prompts: tuple[int, ...]
    """Positions in the prompt set."""
    samples_per_prompt: int
    sampling: SamplingConfig
    max_tokens: int
    seed: int
    """The run's."""
    stage: str
    step: int
    greedy_first: bool = False
    """The first sample of each prompt is greedy."""
    greedy_baseline: bool = False
    """Beside its samples each prompt is answered greedily once more; the answer is no sample."""
    length_extension: LengthExtensionConfig | None = None
    """How positions are embedded; None as the model has it."""
    first: int = 0
    last: int | None = None
    """None stands for the end."""

    @property
    def stop(self) -> int:
        """The end of its samples."""
        return len(self.prompts) * self.samples_per_prompt if self.last is None else self.last

    @property
    def total(self) -> int:
        """Samples of the whole step."""
        return len(self.prompts) * self.samples_per_prompt

    def __len__(self) -> int:
        return self.stop - self.first

    def chunk(self, n: int) -> list[Self]:
        """n consecutive parts, cut as a `Batch` is."""
        ranges = [Share(part, n).range(len(self)) for part in range(n)]
        return [replace(self, first=self.first + rows.start, last=self.first + rows.stop) for rows in ranges]

    def places(self) -> list[tuple[int, int]]:
        """(position of the prompt, number of the sample) of each sample."""
        pairs = [divmod(sample, self.samples_per_prompt) for sample in range(self.first, self.stop)]
        return [(self.prompts[prompt], k) for prompt, k in pairs]

    def baselines(self) -> list[int]:
        """Positions of the prompts that are answered greedily beside the samples, one request each after those of the samples."""
        return list(dict.fromkeys(position for position, _ in self.places())) if self.greedy_baseline else []

    def requests(self, prompt_set: PromptSet, tokenizer: Any) -> list[Request]:
        """What the rollout engine is asked for. What a sample is decides its seed, never where it is drawn."""
        samples = [
            Request(
                prompt_tokens=prompt_set.tokens(tokenizer, position),
                seed=sample_seed(self.seed, self.stage, self.step, prompt_set.prompts[position].id, k),
                sampling=None if self.greedy_first and k == 0 else self.sampling,
                max_tokens=self.max_tokens,
            )
            for position, k in self.places()
        ]
        greedy = [Request(prompt_set.tokens(tokenizer, position), seed=0, sampling=None, max_tokens=self.max_tokens) for position in self.baselines()]
        return [*samples, *greedy]

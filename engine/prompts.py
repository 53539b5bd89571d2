"""Prompts, the order in which steps take them, and the seeds of their samples: all pure functions, so that a resumed run continues exactly."""

import hashlib
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem that a policy is asked to solve."""

    id: str
    """`content_hash` of the messages."""
    index: int
    """Row in its data file, from 0."""
    messages: tuple[dict[str, str], ...]
    """Chat messages, each with role and content; the last one is the user's."""
    data_source: str
    """Chooses the reward function."""
    ground_truth: str
    difficulty: str = "all"
    """Class that evaluation reports accuracy for."""


class PromptSampler:
    """Which prompts each step takes: every prompt once per epoch, in a new order each time, and none twice in one step.

    Steps run across the ends of epochs, so nothing is left out when the number of prompts is no multiple of `prompts_per_step`.
    A step depends on (seed, step) alone; there is no state to save.

    Args:
        prompts: the training set, at least `prompts_per_step` of them.
        prompts_per_step: prompts of one rollout batch.
        seed: the run's seed.
        key: the setting that `prompts_per_step` comes from, for the error.

    Raises:
        ValueError: there are fewer prompts than one step takes.
    """

    def __init__(self, prompts: Sequence[Prompt], prompts_per_step: int, seed: int, key: str = "prompts_per_step") -> None:
        if prompts_per_step > len(prompts):
            raise ValueError(f"{key} ({prompts_per_step}) is larger than the number of training prompts ({len(prompts)}); lower it")
        self.prompts = prompts
        self.prompts_per_step = prompts_per_step
        self.seed = seed

    def step(self, k: int) -> list[Prompt]:
        """Prompts of step `k`, which counts from 1; `prompts_per_step` of them."""
        return [self.prompts[position] for position in self.positions(k)]

    def positions(self, k: int) -> list[int]:
        """Where the prompts of step `k` stand in the training set."""
        if k < 1:
            raise ValueError(f"steps count from 1; got {k}")
        epoch, offset = divmod((k - 1) * self.prompts_per_step, len(self.prompts))
        chosen = self._order(epoch)[offset : offset + self.prompts_per_step]
        missing = self.prompts_per_step - len(chosen)
        if missing:
            chosen = chosen + self._order(epoch + 1)[:missing]
        return chosen

    def more_positions(self, k: int, generation: int) -> list[int]:
        """Where the prompts of a further generation of step `k` stand, generations counting from 1: none that the step has asked before.

        They come beside the epochs, so that no step depends on how many generations another one made. Fewer than `prompts_per_step`, or none,
        once the step has asked all.
        """
        asked = set(self.positions(k))
        others = [position for position in np.random.default_rng([self.seed, k, 1]).permutation(len(self.prompts)).tolist() if position not in asked]
        return others[(generation - 1) * self.prompts_per_step : generation * self.prompts_per_step]

    def _permutation(self, epoch: int) -> list[int]:
        return [int(i) for i in np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts))]

    def _order(self, epoch: int) -> list[int]:
        """The epoch's permutation, with its head changed where the step across the boundary already holds a prompt of it.

        That depends on the tail of the epoch before, and so on back to an epoch that begins with a step of its own: the chain is at most
        `prompts_per_step` epochs long.
        """
        count, size = len(self.prompts), self.prompts_per_step
        aligned_every = size // math.gcd(size, count)
        start = epoch - epoch % aligned_every
        order = self._permutation(start)
        for e in range(start + 1, epoch + 1):
            tail_size = e * count % size
            tail = set(order[count - tail_size :])
            permutation = self._permutation(e)
            head = [i for i in permutation if i not in tail][: size - tail_size]
            in_head = set(head)
            order = head + [i for i in permutation if i not in in_head]
        return order


def content_hash(messages: Sequence[Mapping[str, str]]) -> str:
    """First 16 hex digits of SHA-256 over the messages as canonical JSON: two rows with the same hash are the same prompt.

    Key order, Unicode composition (NFC) and white space around a message do not count.
    """
    plain = [{key: unicodedata.normalize("NFC", str(value)).strip() for key, value in message.items()} for message in messages]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()[:16]


def sample_seed(run_seed: int, stage: str, step: int, prompt_id: str, k: int) -> int:
    """Seed of sample `k` of a prompt, in [0, 2**31): what the sample is decides it, never where or in which order it is generated.

    Replicas hold different samples, so no two of them share a stream however the work is split. Samples of one group differ by construction:
    `k` times an odd number is one-to-one modulo 2**31. Between prompts the first 31 bits of SHA-256 decide.
    """
    key = json.dumps([run_seed, stage, step, prompt_id]).encode()
    base = int.from_bytes(hashlib.sha256(key).digest()[:4], "big")
    return (base + k * 0x9E3779B1) % 2**31

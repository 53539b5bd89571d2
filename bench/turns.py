"""Seconds of calls that take turns, so that what the machine does beside them meets all of them alike."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Calls = Mapping[str, Callable[[], Any]]


def in_turns(calls: Calls, seconds: float, fewest: int = 5, most: int = 31) -> dict[str, list[float]]:
    """Processor seconds of one call of each, round by round, every round beginning with another.

    About `seconds` in all, each measurement of 2 ms at least.
    """
    once = {name: timed(call, 1) for name, call in calls.items()}
    loops = {name: max(1, int(0.002 / spent)) for name, spent in once.items()}
    rounds = int(min(most, max(fewest, seconds / sum(once[name] * loops[name] for name in calls))))
    runs: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        names = list(calls)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            runs[name].append(timed(calls[name], loops[name]))
    return runs


def timed(call: Callable[[], Any], loops: int) -> float:
    """Processor seconds of one call, so that it does not count when a neighbour had the processor.

    What the call returns is freed within, as in a loop; the garbage collector does not come in between.
    """
    gc.collect(0)
    gc.disable()
    start = time.process_time()
    for _ in range(loops):
        call()
    spent = time.process_time() - start
    gc.enable()
    return spent / loops


def ratio(runs: Mapping[str, list[float]], other: str, one: str) -> list[float]:
    """How many times as long `other` takes as `one` in the same round: 25 %, 50 %, 75 %."""
    return statistics.quantiles([theirs / ours for theirs, ours in zip(runs[other], runs[one], strict=True)], method="inclusive")

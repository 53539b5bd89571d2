"""Rewards that do what rewards must not do, for the tests of the runner. What a function does is what its response says."""

import asyncio
import mmap
import os
import re
import subprocess
import time
from typing import Any

FOREVER = 3600
_kept: list[mmap.mmap] = []
_calls: list[str] = []


class Spiteful:
    def __repr__(self) -> str:
        raise RuntimeError("not even that")


def faulty(response: str, ground_truth: str) -> Any:
    match response.partition(" "):
        case ("loop", _, _):
            while True:
                pass
        case ("sleep", _, seconds):
            time.sleep(float(seconds))
        case ("exit", _, code):
            os._exit(int(code))
        case ("kill", _, number):
            os.kill(os.getpid(), int(number))
        case ("leave", _, _):
            raise SystemExit(0)
        case ("raise", _, text):
            raise ValueError(text)
        case ("regex", _, _):
            re.match(r"(a+)+$", "a" * 60 + "b")  # 2^60 ways, in C
        case ("power", _, _):
            return 9 ** (9 ** (9**9))  # in C, with the GIL held
        case ("allocate", _, size):
            return len(bytearray(int(size))) > 0
        case ("keep", _, size):
            _kept.append(mmap.mmap(-1, int(size)))  # address space alone, which takes no time
            return len(_kept)
        case ("child", _, _):
            return subprocess.Popen(["sleep", str(FOREVER)]).pid
        case ("print", _, _):
            print("a reward may print" * 1000)
    return OTHER.get(response, len(response))


OTHER: dict[str, Any] = {
    "nan": float("nan"),
    "infinity": float("inf"),
    "text": "1",
    "none": None,
    "complex": 1j,
    "list": [1.0],
    "huge": 10**400,
    "spiteful": Spiteful(),
    "function": lambda: 1,
    "dict": {"score": 0.5, "clarity": 2},
    "no score": {"value": 1.0},
    "bad metric": {"score": 1.0, "clarity": "high"},
}


async def awaited(response: str) -> Any:
    match response.partition(" "):
        case ("sleep", _, seconds):
            await asyncio.sleep(float(seconds))
        case ("stubborn", _, _):
            while True:
                try:
                    await asyncio.sleep(FOREVER)
                except asyncio.CancelledError:
                    continue
        case _:
            await asyncio.sleep(0)
            return faulty(response, "")
    return len(response)


def together(samples: list[Any]) -> Any:
    if any(sample.response == "too few" for sample in samples):
        return [0.0] * (len(samples) - 1) if len(samples) > 1 else 1.0
    return [faulty(sample.response, sample.ground_truth) for sample in samples]


def told(response: str, messages: Any, data_source: str, response_tokens: int, finished: bool, factor: float = 1.0) -> dict[str, float]:
    return {"score": factor * response_tokens, "messages": len(messages), "finished": finished, "source": len(data_source)}


def needs(response: str, factor: float) -> float:
    return factor * len(response)


def counted(response: str, ground_truth: str) -> float:
    """How often this process was called."""
    _calls.append(response)
    faulty(response, ground_truth)
    return float(len(_calls))

"""How a reward is called: which fields of a sample it takes, by the names of its parameters, and what of its answer counts."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from engine.rewards.types import Function, Outcome, Sample

FIELDS = tuple(field.name for field in fields(Sample))
_REASON_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Call:
    """A reward that is ready to be called."""

    function: Callable[..., Any]
    fields: Sequence[str]
    """Of a sample that it takes; empty where it takes a list of samples."""
    parameters: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], asked: Function) -> "Call":
        """Reads the signature. ValueError names what of it or of the parameters does not fit, and says what there is."""
        known = {
            name: parameter
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(function).parameters.values())
        told = ["samples"] if "samples" in known else [name for name in known if name in FIELDS]
        who, own = f"reward {asked.name}", [name for name in known if name not in told]
        if not told:
            raise ValueError(f"{who} takes nothing of a sample; name parameters {', '.join(FIELDS)}, or samples for a list of them")
        if twice := [name for name in asked.parameters if name in told or name in FIELDS]:
            raise ValueError(f"{who}: {', '.join(twice)} come with each sample and cannot be parameters; give them other names")
        if foreign := [name for name in asked.parameters if name not in own and not open_ended]:
            raise ValueError(f"{who} has no parameter {', '.join(foreign)}; it has: {', '.join(own) or 'none'}")
        if lacking := [name for name in own if name not in asked.parameters and known[name].default is inspect.Parameter.empty]:
            raise ValueError(f"{who} needs {', '.join(lacking)}: set it in parameters; what it can be told of a sample: {', '.join(FIELDS)}")
        if asked.samples_at_once > 1 and not ("samples" in told or inspect.iscoroutinefunction(function)):
            raise ValueError(f"{who} is called with one sample after the other; take samples_at_once out, or make it async or let it take samples")
        return cls(function, () if "samples" in told else told, dict(asked.parameters))

    @property
    def is_async(self) -> bool:
        """Whether a call is something to await."""
        return inspect.iscoroutinefunction(self.function)

    def __call__(self, samples: Sequence[Sample]) -> Any:
        """The function's own answer: a list for a function that takes samples, else of the one sample that there is. A coroutine if it is async."""
        if not self.fields:
            return self.function(samples=list(samples), **self.parameters)
        (sample,) = samples
        return self.function(**{name: getattr(sample, name) for name in self.fields}, **self.parameters)

    def outcomes(self, answer: Any, samples: Sequence[Sample]) -> list[Outcome]:
        """What an answer means for each sample. ValueError where it is not one for each."""
        if self.fields:
            return [outcome_of(answer)]
        if not isinstance(answer, list | tuple) or len(answer) != len(samples):
            number = f"{len(answer)} scores" if isinstance(answer, list | tuple) else repr(answer)[:_REASON_CHARACTERS]
            raise ValueError(f"gave {number} for {len(samples)} samples; it must give a list with one for each")
        return [outcome_of(part) for part in answer]


def outcome_of(answer: Any) -> Outcome:
    """A finite number, or a dict of finite numbers with `score` among them; anything else is an error."""
    numbers = answer if isinstance(answer, Mapping) else {"score": answer}
    if "score" not in numbers:
        return Outcome("error", reason=f"gave a dict with {', '.join(map(str, numbers)) or 'nothing'} in it; it must hold score")
    for name, value in numbers.items():
        if not isinstance(name, str) or not isinstance(value, Real) or not math.isfinite(value):
            what = "" if name == "score" else f" as {name!r}"
            return Outcome("error", reason=f"gave {_short(value)}{what}; it must give a finite number")
    return Outcome("ok", float(numbers["score"]), {name: float(value) for name, value in numbers.items() if name != "score"})


def failed(error: BaseException) -> Outcome:
    """The outcome of a function that raised."""
    return Outcome("error", reason=f"raised {type(error).__name__}: {error}"[:_REASON_CHARACTERS])


def _short(value: object) -> str:
    """How a value reads, whatever its own `__repr__` does."""
    try:
        return repr(value)[:_REASON_CHARACTERS]
    except Exception:  # noqa: BLE001 - somebody else's
        return f"a {type(value).__name__}"

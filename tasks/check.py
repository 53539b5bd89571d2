"""From plain data to a checked recipe: finds every problem in one go, and words it for the person who wrote the key."""

import copy
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tasks import schema
from tasks.config import RecipeConfig
from tasks.problems import ConfigurationError, Problem
from tasks.stage_config import KINDS

# What a configuration without its recipe has to lack.
_INCOMPLETE = {"missing", "too_short", "union_tag_not_found", "value_error"}


def check(data: Any, fallback: Mapping[str, Any], *, complete: bool = True) -> tuple[RecipeConfig | None, list[Problem]]:
    """The configuration that `data` stands for, or None and all problems.

    Pydantic looks at rules between settings only once each setting is right. So a wrong value is replaced by that of `fallback`, which is
    the configuration without overrides, or by the default, and the rest is looked at again. Rules that rest on a replaced value wait.
    `complete=False` reports only what is wrong whatever else there may be.
    """
    problems: list[Problem] = []
    mended: list[schema.Keys] = []
    while True:
        try:
            config = RecipeConfig.model_validate(data)
        except ValidationError as error:
            found = error.errors(include_url=False)
        else:
            return (None if problems else config), problems
        if isinstance(cause := found[0].get("ctx", {}).get("error"), ConfigurationError):
            problems += [problem for problem in cause.problems if not _rests_on(problem, mended)]
            return None, problems
        fresh: list[tuple[schema.Keys, Mapping[str, Any]]] = []
        for item in found:
            keys, holder = schema.locate(item["loc"])
            if keys in mended:
                continue
            # A key that is unknown here may be known to the fallback, which chose another variant.
            fresh.append((keys, {} if item["type"] == "extra_forbidden" else fallback))
            if complete or item["type"] not in _INCOMPLETE:
                problems.append(_problem(item, keys, holder, fallback))
        if not fresh:
            return None, problems
        for keys, instead in fresh:
            data = _mend(data, keys, instead)
        mended += [keys for keys, _ in fresh]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` with the nearest of `known`, or nothing if none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _problem(item: ErrorDetails, keys: schema.Keys, holder: Any, fallback: Mapping[str, Any]) -> Problem:
    key, kind, given, name = ".".join(map(str, keys)), item["type"], item["input"], str(keys[-1]) if keys else ""
    match kind:
        case "extra_forbidden":
            return Problem(key, f"unknown key{_known_instead(keys, holder)}")
        case "missing":
            return Problem(key, f"has to be set: {schema.type_name(schema.child(holder, name))}")
        case "union_tag_not_found":
            stages = fallback.get("stages") or {}
            return Problem(key, f"the recipe has no such stage{did_you_mean(name, stages)}; it has: {', '.join(stages)}; a new one needs a kind")
        case "union_tag_invalid" if len(keys) > 2:
            return Problem(f"{key}.kind", f"is {item['ctx']['tag']!r}; it can be {item['ctx']['expected_tags']}")
        case "union_tag_invalid":
            return Problem(f"{key}.kind", f"is {given['kind']!r}; a stage is of kind {' or '.join(KINDS)}")
        case "value_error":
            return Problem(key, str(item["ctx"]["error"]))
        case "model_type" | "model_attributes_type":
            return Problem(key, f"is {given!r}, but holds settings of its own: {', '.join(schema.names(schema.child(holder, name)))}")
        case "string_type":
            return Problem(key, f"should be a string, is {given!r}; put it into quotes twice: {key}='\"{given}\"'")
    what = item["msg"].replace("Input should", "should").replace("String should", "should").replace("Dictionary should", "should")
    return Problem(key, f"{what}, is {'null' if given is None else repr(given)}")


def _known_instead(keys: schema.Keys, holder: Any) -> str:
    """What may have been meant by an unknown key: one like it at the same place, or the same name elsewhere, or else what there is."""
    *above, name = map(str, keys)
    siblings, variants = schema.names(holder), schema.at(above)
    if others := [schema.tag(model) for model in schema.models(variants) if name in model.model_fields]:
        selects = schema.tag_field(variants)
        has = f"{selects}={schema.tag(holder)}" if isinstance(holder, type) else "this"
        takes = ", ".join(sibling for sibling in siblings if sibling != selects)
        return f" of {has}, which takes: {takes}; {selects}={' or '.join(others)} has {name}"
    if near := difflib.get_close_matches(name, siblings, n=1):
        return f"; did you mean {'.'.join([*above, *near])}?"
    below = [".".join([*above, path]) for path in schema.paths(holder) if path.rpartition(".")[2] == name]
    anywhere = [path for path in schema.paths(RecipeConfig) if path.rpartition(".")[2] == name]
    if found := sorted(dict.fromkeys(below or anywhere), key=lambda path: path.count(".")):
        return f"; did you mean {' or '.join(found[:3])}?"
    return f"; known here: {', '.join(siblings)}"


def _mend(data: Any, keys: schema.Keys, fallback: Mapping[str, Any]) -> Any:
    """`data` with the value at `keys` as in `fallback`, or without it where that has none or the same."""
    data = copy.deepcopy(data)
    target: Any = data
    source: Any = fallback
    for part in keys[:-1]:
        if not isinstance(target, dict) or part not in target:
            return data
        target = target[part]
        source = source.get(part, {}) if isinstance(source, Mapping) else {}
    if not keys or not isinstance(target, dict):
        return data
    last = keys[-1]
    bad = target.pop(last, None)
    if isinstance(source, Mapping) and last in source and source[last] != bad:
        target[last] = source[last]
    return data


def _rests_on(problem: Problem, mended: Iterable[schema.Keys]) -> bool:
    concerned = [key.split(".") for key in (problem.key, *problem.depends_on)]
    return any(list(keys)[: len(key)] == key[: len(keys)] for keys in mended for key in concerned)

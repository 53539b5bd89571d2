"""Reads the configuration classes: which keys there are under a dotted path, and what a type is called in plain words."""

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from engine.config.base import OWN
from tasks.config import RecipeConfig

Keys = tuple[str | int, ...]


def models(annotation: Any) -> list[type[BaseModel]]:
    """Configuration classes that a value of this type can be an instance of: none, one, or the variants of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return models(get_args(annotation)[0])
    if is_union(annotation):
        return [model for member in get_args(annotation) for model in models(member)]
    return []


def is_union(annotation: Any) -> bool:
    """Whether the type is `A | B`, however it was written."""
    return get_origin(annotation) in (Union, types.UnionType)


def mapping_value(annotation: Any) -> Any | None:
    """V of `dict[K, V]` and of `list[V]`, else None."""
    if get_origin(annotation) is Annotated:
        return mapping_value(get_args(annotation)[0])
    return get_args(annotation)[-1] if get_origin(annotation) in (dict, list) else None


def tag_field(annotation: Any) -> str | None:
    """The setting that selects a variant of a union: one with a single possible value. None where there is nothing to select."""
    variants = models(annotation)
    if len(variants) < 2:
        return None
    return next((name for model in variants for name, field in model.model_fields.items() if _only_value(field.annotation) is not None), None)


def tag(model: type[BaseModel]) -> str:
    """Tag of this variant of a union: the value of its setting that can have only one, or else that of something of one's own."""
    return next((value for field in model.model_fields.values() if (value := _only_value(field.annotation)) is not None), OWN)


def default_tag(annotation: Any) -> str | None:
    """Tag of the variant that a value of this type is when nothing selects one; None where something has to."""
    selects = tag_field(annotation)
    return next((tag(model) for model in models(annotation) if selects is not None and not model.model_fields[selects].is_required()), None)


def _only_value(annotation: Any) -> Any | None:
    return get_args(annotation)[0] if get_origin(annotation) is Literal and len(get_args(annotation)) == 1 else None


def locate(location: Keys) -> tuple[Keys, Any]:
    """Keys that pydantic's error location stands for (without the tags of union variants), and the type of what holds the last of them."""
    keys: list[str | int] = []
    holder: Any = None
    annotation: Any = RecipeConfig
    for part in location:
        variants = models(annotation)
        chosen = [model for model in variants if tag(model) == part]
        if len(variants) > 1 and chosen:
            annotation = chosen[0]
        elif part != "[key]":
            keys.append(part)
            holder, annotation = annotation, child(annotation, str(part))
    return tuple(keys), holder


def child(annotation: Any, key: str) -> Any:
    """Type of the value under `key` of a value of this type; None where it has no such key."""
    value = mapping_value(annotation)
    if value is not None:
        return value
    return next((model.model_fields[key].annotation for model in models(annotation) if key in model.model_fields), None)


def at(keys: Iterable[str]) -> Any:
    """Type of the value under these keys of a recipe; None where there is no such place."""
    return functools.reduce(child, keys, RecipeConfig)


def names(annotation: Any) -> list[str]:
    """Keys that a value of this type may have."""
    return list(dict.fromkeys(name for model in models(annotation) for name in model.model_fields))


def paths(annotation: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all keys below a value of this type, as far as they can be known without the value."""
    for model in models(annotation):
        for name, field in model.model_fields.items():
            yield prefix + name
            yield from paths(field.annotation, f"{prefix}{name}.")
    value = mapping_value(annotation)
    if value is not None:
        yield from paths(value, f"{prefix}NAME.")


def type_name(annotation: Any) -> str:
    """A type in plain words: `integer`, `"a" or "b"`, `mapping of string to RLStageConfig`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return type_name(get_args(annotation)[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if selects := tag_field(annotation):
        return f"settings by `{selects}`"
    if is_union(annotation):
        return " or ".join(type_name(member) for member in get_args(annotation))
    if origin is dict:
        key, value = get_args(annotation)
        return f"mapping of {type_name(key)} to {type_name(value)}"
    if origin is list:
        return f"list of {type_name(get_args(annotation)[0])}"
    plain = {int: "integer", float: "number", str: "string", bool: "`true` or `false`", type(None): "`null`"}
    return plain.get(annotation) or annotation.__name__


def bounds(annotation: Any) -> Iterator[Any]:
    """Rules such as `Gt(gt=0)` that stand inside the type itself: those of T in `T | None`."""
    if is_union(annotation):
        for member in get_args(annotation):
            yield from bounds(member)
    elif get_origin(annotation) is Annotated:
        for rule in get_args(annotation)[1:]:
            yield from getattr(rule, "metadata", ())

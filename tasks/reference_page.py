"""Writes docs/configuration.md from the configuration classes: every key with its type, range, default and meaning (`make docs`)."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tasks import schema
from tasks.compose import choices
from tasks.config import RecipeConfig
from tasks.workspace import checkout, conf_directory

PAGE = checkout() / "docs" / "configuration.md"

_HEAD = """# Configuration

Made from the code by `make docs`; do not edit.

A recipe is composed by [Hydra](https://hydra.cc) from the groups under `conf/` and then checked as a whole: unknown keys, types, ranges and rules
between settings, all errors at once. Every key below can be set on the command line, whether or not a file mentions it:

```
almanac run recipe=polaris_tiny stages.rl.steps=40 resources=one_cpu algorithm@stages.rl.algorithm=dr_grpo '~stages.sft'
```

`key=value` sets a value, `group=FILE` swaps a file of a group (`group@stages.STAGE.group=FILE` within a stage), `~key` takes something out.
`STAGE` stands for the name of a stage.
"""
_LIMITS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤", "multiple_of": "multiple of"}


def page() -> str:
    """The whole page, as Markdown."""
    return "\n".join([_HEAD, *_groups(), *_sections()]) + "\n"


def _groups() -> Iterator[str]:
    yield "## Groups\n"
    yield "| group | file | what it is |"
    yield "|---|---|---|"
    for group in sorted(path.name for path in conf_directory().iterdir() if path.is_dir()):
        for name, comment in choices(group).items():
            yield f"| `{group}` | `{name}` | {comment} |"
    yield ""


def _sections() -> Iterator[str]:
    """One for each class, in the order in which the recipe mentions them, with all places where its settings stand."""
    places: dict[type[BaseModel], list[str]] = {}
    _collect(RecipeConfig, "", places)
    for model, prefixes in places.items():
        yield f"## {model.__name__}\n"
        yield f"{(model.__doc__ or '').strip()}\n"
        if prefixes != [""]:
            yield f"At {', '.join(f'`{prefix}`' for prefix in prefixes)}.\n"
        yield "| key | type | default | meaning |"
        yield "|---|---|---|---|"
        for name, field in model.model_fields.items():
            yield _row(name, field)
        yield ""


def _collect(annotation: Any, prefix: str, places: dict[type[BaseModel], list[str]]) -> None:
    for model in schema.models(annotation):
        places.setdefault(model, []).append(prefix)
        for name, field in model.model_fields.items():
            _collect(field.annotation, f"{prefix}.{name}" if prefix else name, places)
    value = schema.mapping_value(annotation)
    if value is not None:
        _collect(value, f"{prefix}.STAGE", places)


def _row(name: str, field: FieldInfo) -> str:
    meaning = field.description or next((model.__doc__ or "" for model in schema.models(field.annotation)), "")
    cells = [f"`{name}`", _type(field), _default(field.default), " ".join(meaning.split())]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(field: FieldInfo) -> str:
    text = schema.type_name(field.annotation)
    for model in [*schema.models(field.annotation), *schema.models(schema.mapping_value(field.annotation))]:
        text = text.replace(model.__name__, f"[{model.__name__}](#{model.__name__.lower()})")
    rules = [*field.metadata, *schema.bounds(field.annotation)]
    limits = [f"{sign} {getattr(rule, name)}" for rule in rules for name, sign in _LIMITS.items() if hasattr(rule, name)]
    return ", ".join([text, *limits])


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "needed"
    if isinstance(value, BaseModel):
        return "its defaults"
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

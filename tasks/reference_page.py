"""Writes docs/configuration.md from the configuration classes: every key with its type, range, default and meaning (`make docs`)."""

import json
import re
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
almanac run recipe=grpo_tiny stages.rl.steps=40 resources=one_cpu algorithm@stages.rl.algorithm=dr_grpo '~stages.sft'
```

`key=value` sets a value, `group=FILE` swaps a file of a group (`group@stages.STAGE.group=FILE` within a stage), `~key` takes something out.
`STAGE` stands for the name of a stage, `NAME` for another name that the recipe gives.
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
            yield f"At {', '.join(dict.fromkeys(prefixes))}.\n"
        yield "| key | type | default | meaning |"
        yield "|---|---|---|---|"
        for name, field in model.model_fields.items():
            yield _row(name, field)
        yield ""


def _collect(annotation: Any, prefix: str, places: dict[type[BaseModel], list[str]]) -> None:
    selects = schema.tag_field(annotation)
    for model in schema.models(annotation):
        where = f"`{prefix}`" if selects is None else f"`{prefix}` with `{selects}: {_selected_by(model, selects)}`"
        places.setdefault(model, []).append(where if prefix else "")
        for name, field in model.model_fields.items():
            _collect(field.annotation, f"{prefix}.{name}" if prefix else name, places)
    value = schema.mapping_value(annotation)
    if value is not None:
        _collect(value, f"{prefix}.{'STAGE' if prefix == 'stages' else 'NAME'}", places)


def _selected_by(model: type[BaseModel], selects: str) -> str:
    return "module:function" if model.model_fields[selects].annotation is str else schema.tag(model)


def _row(name: str, field: FieldInfo) -> str:
    meaning = field.description or next((model.__doc__ or "" for model in schema.models(field.annotation)), "")
    cells = [f"`{name}`", _type(field), _default(field), " ".join(meaning.split())]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(field: FieldInfo) -> str:
    text, inner = schema.type_name(field.annotation), field.annotation
    while (value := schema.mapping_value(inner)) is not None:
        inner = value
    if selects := schema.tag_field(inner):
        variants = [f"[`{_selected_by(model, selects)}`](#{model.__name__.lower()})" for model in schema.models(inner)]
        return f"{text}: {', '.join(variants)}"
    for model in [*schema.models(field.annotation), *schema.models(schema.mapping_value(field.annotation))]:
        text = re.sub(rf"\b{model.__name__}\b", f"[{model.__name__}](#{model.__name__.lower()})", text)
    rules = [*field.metadata, *schema.bounds(field.annotation)]
    limits = [f"{sign} {getattr(rule, name)}" for rule in rules for name, sign in _LIMITS.items() if hasattr(rule, name)]
    return ", ".join([text, *limits])


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "needed"
    if isinstance(field.default, BaseModel):
        selects = schema.tag_field(field.annotation)
        return "its defaults" if selects is None else f"`{selects}={schema.tag(type(field.default))}`"
    return f"`{json.dumps(field.default, default=lambda settings: settings.model_dump(exclude_defaults=True))}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

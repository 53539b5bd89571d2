"""What every configuration class is built on."""

import hashlib
import json
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field

from engine.registry import Registry, is_place

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
"""Becomes part of directories, metric names and MLflow names."""


class Settings(BaseModel):
    """Base of every configuration class: frozen, strict about types, no unknown keys, no non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def digest(self) -> str:
        """SHA-256 over the resolved settings, as canonical JSON: equal settings have equal digests on every machine."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        """Only what differs from the defaults travels to the workers, a tenth of the whole."""
        return _settings, (type(self), self.model_dump(exclude_defaults=True))


def _settings(kind: type[Settings], values: dict[str, Any]) -> Settings:
    return kind.model_validate(values)


def known(registry: Registry[Any], key: str, name: str) -> None:
    """Raises `ValueError` where `name` is neither registered nor a place of one's own (`module:attribute`)."""
    try:
        registry.locate(name)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


OWN = "own"
"""Tag of the member of a union that stands for somebody's own function."""


def chosen_by(key: str, default: str) -> Discriminator:
    """Selects the member of a union by its setting `key`: the tag is the name, `default` where it is left out, or `own` for `module:attribute`."""

    def tag(value: Any) -> str:
        name = str(value.get(key, default) if isinstance(value, dict) else getattr(value, key, default))
        return OWN if is_place(name) else name

    return Discriminator(tag)


def name_known(registry: Callable[[], Registry[Any]], key: str) -> BeforeValidator:
    """Refuses names under `key` that `registry()` does not have, and says which is the nearest, before a member of the union is looked for."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and key in value:
            known(registry(), key, str(value[key]))
        return value

    return BeforeValidator(check)

"""Names that configuration may use, and the functions they stand for. A name costs an import only when it is used."""

import ast
import difflib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions by name, each written as `"module:function"`.

    Listing and describing read source text and import nothing heavy, so that `almanac list` and `almanac preflight` start at once.
    """

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self._kind = kind
        self._entries = dict(entries)

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries)

    def get(self, name: str) -> F:
        """The function that `name` stands for. ValueError lists the names, and the nearest one, if there is none."""
        module, function = self._locate(name)
        return cast(F, getattr(importlib.import_module(module), function))

    def describe(self, name: str) -> str:
        """First line of the function's docstring."""
        module, function = self._locate(name)
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"{self._kind} {name}: no module {module}"
        assert spec.origin is not None, f"{self._kind} {name}: {module} has no source file"
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        definition = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
        return (ast.get_docstring(definition) or "").partition("\n")[0]

    def _locate(self, name: str) -> tuple[str, str]:
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f": did you mean {near[0]}?" if near else "."
            raise ValueError(f"no {self._kind} is called {name!r}{hint} There are: {', '.join(self.names())}")
        module, _, function = self._entries[name].partition(":")
        return module, function

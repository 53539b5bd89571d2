"""Names that configuration may use, and the functions and classes they stand for. A name costs an import only when it is used."""

import ast
import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_place(name: str) -> bool:
    """Whether `name` is a place of one's own, `module:attribute`."""
    return _PLACE.fullmatch(name) is not None


class Registry(Generic[F]):
    """Functions or classes by name, each written as `"module:attribute"`. Where a name is looked up, such a place of one's own will do as well.

    Listing and describing read source text and import nothing heavy, so that `almanac list` and `almanac preflight` start at once.

    Args:
        kind: what errors call an entry.
        entries: places by name.
        methods: what a class must have to be one of these; none for functions.
    """

    def __init__(self, kind: str, entries: Mapping[str, str], methods: Sequence[str] = ()) -> None:
        self._kind = kind
        self._entries = dict(entries)
        self.methods = tuple(methods)

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries)

    def get(self, name: str) -> F:
        """What `name` stands for. ValueError lists the names, and the nearest one, if there is none, or says what is wrong with a place."""
        module, attribute = self.locate(name)
        if name in self._entries:
            return cast(F, getattr(importlib.import_module(module), attribute))
        return cast(F, self._own(name, module, attribute))

    def _own(self, name: str, module: str, attribute: str) -> Any:
        """An attribute of a module that somebody else wrote, whose import may raise anything."""
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            near = difflib.get_close_matches(attribute, dir(sys.modules.get(module)), n=1) if isinstance(error, AttributeError) else []
            hint = f": did you mean {near[0]}?" if near else ""
            raise ValueError(f"{self._kind} {name} cannot be imported ({error}{hint}); is its directory on PYTHONPATH?") from error
        except Exception as error:
            raise ValueError(f"{self._kind} {name} cannot be imported: its module raises {type(error).__name__}: {error}") from error
        if not callable(found):
            raise ValueError(f"{self._kind} {name} is a {type(found).__name__}, and must be a function or a class")
        if lacking := [method for method in self.methods if not callable(getattr(found, method, None))]:
            raise ValueError(f"{self._kind} {name} has no method {', '.join(lacking)}; it needs: {', '.join(self.methods)}")
        return found

    def describe(self, name: str) -> str:
        """First line of the docstring."""
        module, attribute = self.locate(name)
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"{self._kind} {name}: no module {module}"
        assert spec.origin is not None, f"{self._kind} {name}: {module} has no source file"
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        definition = next(node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == attribute)
        return (ast.get_docstring(definition) or "").partition("\n")[0]

    def locate(self, name: str) -> tuple[str, str]:
        """Module and attribute of a name; imports nothing. ValueError as `get`."""
        if is_place(name):
            module, _, attribute = name.partition(":")
            return module, attribute
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f": did you mean {near[0]}?" if near else "."
            raise ValueError(f"no {self._kind} is called {name!r}{hint} There are: {', '.join(self.names())}; or module:name of your own")
        module, _, attribute = self._entries[name].partition(":")
        return module, attribute

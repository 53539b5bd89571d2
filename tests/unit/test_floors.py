"""The house has floors, and imports go down only; judged by the source text, lazy imports included."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What each floor may not import: the floors above it, and the libraries that belong to those.
FORBIDDEN = {
    "engine": {"tasks", "flows", "prefect", "mlflow", "dvc", "hydra", "omegaconf", "pandera", "great_expectations"},
    "tasks": {"flows", "prefect"},
    "flows": set(),
}
FILES = [path for floor in FORBIDDEN for path in sorted((ROOT / floor).rglob("*.py"))]


def imported(source: str) -> Iterator[str]:
    """Top-level names of all modules that the source imports, at whatever depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which floor they go to"
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(argument.value).partition(".")[0] for argument in node.args if isinstance(argument, ast.Constant))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    """Mutation: `from tasks.record import RunRecord` inside any function of the engine turns this red."""
    floor = path.relative_to(ROOT).parts[0]
    assert not FORBIDDEN[floor] & set(imported(path.read_text(encoding="utf-8")))


def test_the_check_sees_every_kind_of_import() -> None:
    source = "import a.b\ndef f():\n    from c.d import e\n    importlib.import_module('g.h')\n    return __import__('i')\n"
    assert set(imported(source)) == {"a", "c", "g", "i"}


def test_there_is_something_to_check() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(FORBIDDEN)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_and_files_stay_short(path: Path) -> None:
    """A function beyond 60 lines or a file beyond 400 asks to be divided along a real seam."""
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 400
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert not [node.name for node in functions if (node.end_lineno or 0) - node.lineno >= 60]

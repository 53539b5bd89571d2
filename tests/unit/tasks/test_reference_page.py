"""The reference page is what the code says."""

from tasks import schema
from tasks.config import RecipeConfig
from tasks.reference_page import PAGE, page


def test_page_is_current() -> None:
    """Mutation: change a default or a docstring of any setting without `make docs`."""
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_page_has_every_key() -> None:
    text = page()
    for path in schema.paths(RecipeConfig):
        if path != "stages.NAME":
            assert f"| `{path.rpartition('.')[2]}` |" in text, path

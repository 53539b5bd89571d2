"""What all pages have in common: one file each, which loads nothing, for a browser, for MLflow and for paper."""

import functools
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tasks.failure import reason

logger = logging.getLogger(__name__)

STYLE = (("engine.control", "trace_page.css"), ("tasks.pages", "page.css"))


@functools.cache
def _environment() -> Environment:
    made = Environment(loader=PackageLoader("tasks", "pages"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"number": number, "seconds": seconds, "percent": percent, "short": short}
    made.globals["style"] = Markup("".join(resources.files(package).joinpath(name).read_text(encoding="utf-8") for package, name in STYLE))
    return made


def render(template: str, **values: object) -> str:
    """A page from its template in `tasks/pages`; every text in it is escaped, but for what is `Markup`."""
    return _environment().get_template(template).render(**values)


def write(path: Path, text: str) -> None:
    """Replaces a page; a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


@contextmanager
def drawing(what: str, tell: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """What cannot be drawn costs nothing but itself: the log has the traceback, and `tell` a sentence. Numbers are to be written before the block.

    Args:
        what: pictures or pages, in words.
        tell: shows the sentence to a person, where there is one.
    """
    try:
        yield
    except Exception as error:  # whatever a library for pictures raises
        logger.exception("%s could not be drawn", what)
        tell(f"{what} could not be drawn: {reason(error)}")


def number(value: float | None) -> str:
    """Four digits."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "not finite"
    return f"{value:.4g}"


def seconds(value: float | None) -> str:
    """With its unit."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def percent(value: float | None) -> str:
    """Of a fraction of 1."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def short(text: str | None) -> str:
    """The beginning of a hash."""
    return (text or "unknown")[:12]

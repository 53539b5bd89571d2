"""The page about a validated data set: one file that needs nothing from elsewhere, for a browser, for MLflow, and for paper."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks import charts
from tasks import page as pages
from tasks.charts import Figure, figure
from tasks.expectations import DOCS, Result

CLASSES = 12
"""Bars of one distribution; the other classes are counted together."""
LONGEST_NAME = 22
"""Characters of a class, at most."""

_NAMES = {"data_source": "Data sources", "difficulty": "Difficulties", "language": "Languages (a guess)", "prompt_tokens": "Tokens of a prompt"}


def page(summary: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The whole page.

    Args:
        summary: of `tasks.validate`: recipe, made, rows, dropped, shares, problems, compared_with, digests.
        results: in the order in which they are to stand.
    """
    return pages.render(
        "quality.html",
        summary=summary,
        checks=[{"result": result, "measured": _measured(result), "page": f"{DOCS}/{result.suite}.html"} for result in results],
        distributions={split: list(_distributions(columns)) for split, columns in summary["shares"].items() if columns},
    )


def _measured(result: Result) -> str:
    """What a check found: a number of the whole set, or the rows that fail it."""
    if isinstance(result.observed, float):
        return f"{result.observed:.3g}"
    return f"{result.observed}" if result.observed is not None else f"{result.failing:,} rows ({100 * result.fraction:.2g} %)"


def _distributions(columns: Mapping[str, Mapping[str, float]]) -> Iterator[Figure]:
    for name, values in columns.items():
        shown = _largest(values, ordered=name == "prompt_tokens")
        bars = {key if len(key) <= LONGEST_NAME else f"{key[: LONGEST_NAME - 1]}…": {"share": share} for key, share in shown.items()}
        yield figure(_NAMES[name], charts.stacked(bars, ["share"], lambda value: f"{100 * value:.1f} %"))


def _largest(values: Mapping[str, float], *, ordered: bool) -> dict[str, float]:
    """The classes that there is room for: in the order of their numbers, or as they come."""
    shown = sorted(values.items(), key=lambda pair: int(pair[0].split("-")[0])) if ordered else list(values.items())
    if len(shown) <= CLASSES:
        return dict(shown)
    rest = shown[CLASSES - 1 :]
    return dict([*shown[: CLASSES - 1], (f"{len(rest)} others", sum(share for _, share in rest))])

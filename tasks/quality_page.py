"""The page about a validated data set: one file that needs nothing from elsewhere, for a browser, for MLflow, and for paper."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from tasks.expectations import DOCS, Result

CLASSES = 12
"""Bars of one distribution; the other classes are counted together."""

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1080px; margin: 0 auto; padding: 24px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 18px; margin: 28px 0 8px; } h3 { font-size: 15px; margin: 12px 0 4px; }
.verdict { display: inline-block; padding: 4px 12px; border-radius: 6px; font-weight: 600; margin: 12px 0; }
.good { background: #dafbe1; color: #116329; } .bad { background: #ffebe9; color: #a40e26; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid #d0d7de; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 8px 28px; }
.bar { display: grid; grid-template-columns: 9em 1fr 5em; gap: 8px; align-items: center; font-size: 13px; }
.bar > :first-child { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; } .bar > :last-child { text-align: right; white-space: nowrap; }
.bar i { display: block; height: 11px; background: #2f6f9f; } .dim { color: #59636e; } code { font-size: 13px; overflow-wrap: anywhere; }
@media print { body { padding: 0; max-width: none; } section, tr { break-inside: avoid; } }
"""
_NAMES = {"data_source": "Data sources", "difficulty": "Difficulties", "language": "Languages (a guess)", "prompt_tokens": "Tokens of a prompt"}


def page(summary: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The whole page.

    Args:
        summary: of `tasks.validate`: recipe, made, rows, dropped, shares, problems, compared_with, digests.
        results: in the order in which they are to stand.
    """
    problems = summary["problems"]
    verdict = f"{len(problems)} of {len(results)} checks failed" if problems else f"all {len(results)} checks passed"
    parts = [
        f"<h1>Data set {escape(summary['recipe'])}</h1>",
        f'<div class="verdict {"bad" if problems else "good"}">{verdict}</div>',
        f'<p class="dim">Validated {escape(summary["made"])}; {_compared(summary)}</p>',
        *([f"<h2>What failed</h2><ul>{''.join(f'<li>{escape(problem)}</li>' for problem in problems)}</ul>"] if problems else []),
        f"<h2>Splits</h2>{_splits(summary)}",
        f"<h2>Checks</h2>{_checks(results)}",
        "<h2>Rows</h2>",
        *_distributions(summary["shares"]),
    ]
    title = escape(f"Data set {summary['recipe']}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>{_STYLE}</style>'
    return "\n".join(["<!DOCTYPE html>", f'<html lang="en"><head>{head}</head><body>', *parts, "</body></html>", ""])


def _compared(summary: Mapping[str, Any]) -> str:
    before = summary["compared_with"]
    return f"compared with the version of {escape(before)}." if before else "there is no earlier version with the same settings to compare it with."


def _splits(summary: Mapping[str, Any]) -> str:
    rows = []
    for split, count in summary["rows"].items():
        dropped = ", ".join(f"{number:,} {escape(what.replace('_', ' '))}" for what, number in summary["dropped"][split].items() if number) or "none"
        digest = escape(summary["digests"][split])
        cells = f'<td>{escape(split)}</td><td class="number">{count:,}</td><td>{dropped}</td><td><code title="{digest}">{digest[:16]}</code></td>'
        rows.append(f"<tr>{cells}</tr>")
    return f'<table><tr><th>split</th><th class="number">rows</th><th>left out before</th><th>SHA-256</th></tr>{"".join(rows)}</table>'


def _checks(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        found = f"{result.observed}" if result.observed is not None else f"{result.failing:,} rows ({100 * result.fraction:.2g} %)"
        if isinstance(result.observed, float):
            found = f"{result.observed:.3g}"
        examples = "".join(f"<br><code>row {example['row']}: {escape(str(example['value'])[:200])}</code>" for example in result.examples)
        sign = '<td class="good">passed</td>' if result.success else '<td class="bad">failed</td>'
        link = f'<a href="{DOCS}/{escape(result.suite)}.html">{escape(result.suite.replace("_", " "))}</a>'
        rows.append(f"<tr><td>{link}</td><td>{escape(result.check.replace('_', ' '))}</td>{sign}<td>{escape(found)}{examples}</td></tr>")
    head = "<tr><th>of</th><th>check</th><th></th><th>measured, or rows that fail it</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _distributions(shares: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[str]:
    for split, columns in shares.items():
        if columns:
            figures = "".join(
                f"<section><h3>{_NAMES[name]}</h3>{_bars(values, ordered=name == 'prompt_tokens')}</section>" for name, values in columns.items()
            )
            yield f'<h3>{escape(split)}</h3><div class="grid">{figures}</div>'


def _bars(values: Mapping[str, float], *, ordered: bool) -> str:
    shown = sorted(values.items(), key=lambda pair: int(pair[0].split("-")[0])) if ordered else list(values.items())
    if len(shown) > CLASSES:
        rest = shown[CLASSES - 1 :]
        shown = [*shown[: CLASSES - 1], (f"{len(rest)} others", sum(share for _, share in rest))]
    most = max(share for _, share in shown)
    return "".join(
        f'<div class="bar"><span title="{escape(name)}">{escape(name)}</span><i style="width: {100 * share / most:.1f}%"></i>'
        f"<span>{100 * share:.1f} %</span></div>"
        for name, share in shown
    )

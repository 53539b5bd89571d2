"""Charts as SVG, for pages that load nothing. Colours are the page's classes: `c0` to `c7`, or the words of a verdict (tasks/pages/page.css)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib.ticker import MaxNLocator

WIDTH, HEIGHT = 372, 168
LEFT, RIGHT, TOP, BOTTOM = 56, 8, 10, 24
MOST_POINTS = 400
"""Of a line; a longer one is drawn by the means of its parts."""
COLOURS = 8
SMALL, MOST_DIGITS = 1e-3, 7
"""Numbers below the one are written with an exponent."""
ROUNDING = 1e-9
"""Relative difference below which values are the same."""
LETTER = 6.2
"""Mean width of a character, in pixels, generously."""

Form = Callable[[float], str]
"""How a number is written."""

Figure = dict[str, Any]
"""`title`, `svg`, `legend` (names, in the order of the colours), `wide`: what `tasks/pages/parts.html` shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Values over x; both of length [points]. Values that are not finite leave a gap."""

    css: str
    """Classes."""
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """What lies between two curves over x; all of length [points]."""

    css: str
    xs: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True, slots=True)
class Bar:
    """A value, with its interval where it has one."""

    value: float
    low: float | None = None
    high: float | None = None


def figure(title: str, svg: Markup, legend: Sequence[str] = (), *, wide: bool = False) -> Figure:
    """One chart as the pages take it."""
    return {"title": title, "svg": svg, "legend": list(legend), "wide": wide}


def percent(value: float) -> str:
    """Of a fraction of 1."""
    return f"{100 * value:.3g} %"


def colour(number: int) -> str:
    """Class of the colour with this number; after the last comes the first."""
    return f"c{number % COLOURS}"


@dataclass(frozen=True, slots=True)
class _Axes:
    """From numbers to pixels."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: int = WIDTH
    height: int = HEIGHT

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (self.width - LEFT - RIGHT) * (value - low) / ((high - low) or 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return TOP + (self.height - TOP - BOTTOM) * (high - value) / (high - low)

    def points(self, xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
        return [(self.x(x), self.y(y)) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]

    def y_ticks(self, form: Form | None) -> list[str]:
        low, high = self.y_range
        ticks = [float(tick) for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]
        texts = _written(ticks) if form is None else [form(tick) for tick in ticks]
        return [
            f'<line class="rule" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{self.y(tick):.1f}" y2="{self.y(tick):.1f}"/>'
            f'<text class="y" x="{LEFT - 6}" y="{self.y(tick):.1f}">{text}</text>'
            for tick, text in zip(ticks, texts, strict=True)
        ]

    def x_label(self, at: float, label: str) -> str:
        return f'<text class="x" x="{at:.1f}" y="{self.height - BOTTOM + 13}">{escape(label)}</text>'

    def x_ticks(self, *, whole: bool) -> list[str]:
        low, high = self.x_range
        return [self.x_label(self.x(tick), f"{tick:g}") for tick in MaxNLocator(5, integer=whole).tick_values(low, high) if low <= tick <= high]

    def svg(self, parts: Sequence[str]) -> Markup:
        return Markup(f'<svg class="curve" viewBox="0 0 {self.width} {self.height}" role="img">{"".join(parts)}</svg>')


def lines(
    curves: Sequence[Line],
    *,
    bands: Sequence[Band] = (),
    x_range: tuple[float, float] | None = None,
    marks: Sequence[float] = (),
    form: Form | None = None,
    whole: bool = True,
) -> Markup:
    """Curves over one x, each with a dot at its end.

    Args:
        curves: drawn in this order.
        bands: behind them.
        x_range: shown; that of the curves without it.
        marks: where on x a line stands upright.
        form: of the numbers on y.
        whole: x counts something.
    """
    shown = [value for one in curves for value in one.ys] + [value for band in bands for value in (*band.low, *band.high)]
    finite = [value for value in shown if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    # A mean of equal values differs from them by rounding, which is no curve.
    flat = high - low <= ROUNDING * max(abs(high), abs(low))
    margin = (0.05 * abs(high) or 1.0) if flat else 0.06 * (high - low)
    # What is never negative has no axis below 0.
    low, high = low - margin if low < 0 else max(0.0, low - margin), high + margin
    xs = [x for one in curves for x in one.xs] + [x for band in bands for x in band.xs] or [0.0]
    axes = _Axes(x_range or (min(xs), max(xs)), (low, high))
    parts = [*axes.y_ticks(form), *axes.x_ticks(whole=whole)]
    for band in bands:
        upper, lower = axes.points(band.xs, band.high), axes.points(band.xs, band.low)
        parts.append(f'<polygon class="band {band.css}" points="{_joined([*upper, *lower[::-1]])}"/>')
    parts += [f'<line class="mark" x1="{axes.x(mark):.1f}" x2="{axes.x(mark):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>' for mark in marks]
    for one in curves:
        drawn = axes.points(*_thinned(one.xs, one.ys))
        parts.append(f'<polyline class="{one.css}" points="{_joined(drawn)}"/>')
        parts += [f'<circle class="{one.css}" cx="{at:.1f}" cy="{height:.1f}" r="3"/>' for at, height in drawn[-1:]]
    return axes.svg(parts)


def bars(groups: Sequence[str], series: Mapping[str, Sequence[Bar | None]], form: Form, *, most: float | None = None, wide: bool = False) -> Markup:
    """Groups of bars, one of each series, with their intervals.

    Args:
        groups: names below the bars.
        series: bars of each group, [groups]; the first series has the colour c0.
        form: of the numbers.
        most: top of the axis; that of the highest bar without it.
        wide: twice the width.
    """
    found = [bar for of_group in series.values() for bar in of_group if bar is not None]
    top = most if most is not None else 1.12 * max((bar.high if bar.high is not None else bar.value for bar in found), default=0.0) or 1.0
    axes = _Axes((0, len(groups)), (0, top), width=2 * WIDTH if wide else WIDTH)
    slot = axes.x(1) - axes.x(0)
    width = min(46.0, 0.82 * slot / len(series))
    parts = axes.y_ticks(form)
    fits = width > LETTER * (1 + max((len(form(bar.value)) for bar in found), default=0))
    for number, (name, of_group) in enumerate(series.items()):
        for group, bar in enumerate(of_group):
            if bar is not None:
                middle = axes.x(group + 0.5) + (number - (len(series) - 1) / 2) * width
                parts.append(_bar(axes, middle, width, bar, colour(number), f"{groups[group]}, {name}: {form(bar.value)}", form if fits else None))
    fit = max(3, int(slot / LETTER))
    parts += [axes.x_label(axes.x(group + 0.5), name if len(name) <= fit else f"{name[: fit - 1]}…") for group, name in enumerate(groups)]
    return axes.svg(parts)


def _bar(axes: _Axes, middle: float, width: float, bar: Bar, css: str, tip: str, form: Form | None) -> str:
    top, base = axes.y(bar.value), axes.y(0)
    drawn = _rect(css, middle - 0.45 * width, top, 0.9 * width, max(0.0, base - top), tip)
    if bar.low is not None and bar.high is not None:
        low, high = axes.y(bar.low), axes.y(bar.high)
        drawn += f'<path class="whisker" d="M{middle:.1f} {low:.1f}V{high:.1f}M{middle - 3:.1f} {low:.1f}h6M{middle - 3:.1f} {high:.1f}h6"/>'
        top = high
    return drawn + (f'<text class="value" x="{middle:.1f}" y="{top - 7:.1f}">{form(bar.value)}</text>' if form else "")


def _rect(css: str, x: float, y: float, width: float, height: float, tip: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="filled {css}" {place}><title>{escape(tip)}</title></rect>'


def stacked(rows: Mapping[str, Mapping[str, float]], parts: Sequence[str], form: Form) -> Markup:
    """One bar a row, lying, made of parts; the whole stands at its end.

    Args:
        rows: value of each part, by the row's name.
        parts: in their order; the first has the colour c0.
        form: of the numbers.
    """
    left, high, step = 12 + LETTER * max(map(len, rows)), 20, 30
    width, longest = 2 * WIDTH, max((sum(row.values()) for row in rows.values()), default=0.0) or 1.0
    scale = (width - left - 70) / longest
    drawn = []
    for number, (name, row) in enumerate(rows.items()):
        x, y = left, 4 + step * number
        drawn.append(f'<text class="y" x="{left - 8:.1f}" y="{y + high / 2}">{escape(name)}</text>')
        for part in parts:
            length = scale * row.get(part, 0.0)
            if length > 0:
                tip = f"{name}, {part}: {form(row[part])}"
                drawn.append(_rect(colour(parts.index(part)), x, y, max(0.5, length - 1), high, tip))
                if length > LETTER * (len(form(row[part])) + 1):
                    drawn.append(f'<text class="inside" x="{x + length / 2:.1f}" y="{y + high / 2}">{form(row[part])}</text>')
            x += length
        drawn.append(f'<text class="end" x="{x + 6:.1f}" y="{y + high / 2}">{form(sum(row.values()))}</text>')
    return Markup(f'<svg class="curve" viewBox="0 0 {width} {step * len(rows) + 4}" role="img">{"".join(drawn)}</svg>')


def histograms(columns: Mapping[str, Sequence[float]], bins: int = 16) -> Markup:
    """How values are distributed, one upright histogram a column, all over the same axis; the longest bar of a column fills it.

    Args:
        columns: values, by what stands below.
        bins: of each.
    """
    values = [value for column in columns.values() for value in column]
    edges = np.linspace(0, max(values, default=0.0) or 1.0, bins + 1)
    axes = _Axes((0, len(columns)), (0, float(edges[-1])), width=2 * WIDTH)
    slot = axes.x(1) - axes.x(0)
    parts, fit = axes.y_ticks(None), max(3, int(slot / LETTER))
    for number, (name, column) in enumerate(columns.items()):
        shares = np.histogram(column, edges)[0] / max(1, len(column))
        for share, low, high in zip(shares, edges[:-1], edges[1:], strict=True):
            if share > 0:
                tip = f"{name}: {low:.0f} to {high:.0f}, {100 * share:.0f} % of {len(column)}"
                length, top = 0.86 * slot * share / shares.max(), axes.y(high)
                parts.append(_rect("c0", axes.x(number) + 2, top + 0.5, length, axes.y(low) - top - 1, tip))
        if len(column):
            middle = axes.y(float(np.mean(column)))
            parts.append(f'<line class="mean" x1="{axes.x(number):.1f}" x2="{axes.x(number) + 0.9 * slot:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>')
        parts.append(axes.x_label(axes.x(number + 0.5), name if len(name) <= fit else f"{name[: fit - 1]}…"))
    return axes.svg(parts)


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    if len(xs) <= MOST_POINTS:
        return xs, ys
    parts = zip(np.array_split(np.asarray(xs, float), MOST_POINTS), np.array_split(np.asarray(ys, float), MOST_POINTS), strict=True)
    means = [(float(x.mean()), float(y[np.isfinite(y)].mean()) if np.isfinite(y).any() else math.nan) for x, y in parts]
    return [x for x, _ in means], [y for _, y in means]


def _written(ticks: Sequence[float]) -> list[str]:
    """Ticks with as many digits as they need."""
    small, texts = max(map(abs, ticks), default=0.0) < SMALL, [f"{tick:g}" for tick in ticks]
    for digits in range(MOST_DIGITS):
        texts = ["0" if tick == 0 else f"{tick:.{digits}{'e' if small else 'f'}}" for tick in ticks]
        if all(math.isclose(float(text), tick, rel_tol=1e-6) for text, tick in zip(texts, ticks, strict=True)):
            break
    return texts


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{at:.1f},{height:.1f}" for at, height in points)

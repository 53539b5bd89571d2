"""Curves as SVG, for a page that loads nothing: tonight's over the reference's band. Colours are the page's classes."""

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from tasks.curves import Series
from tasks.reference import MetricReference

WIDTH, HEIGHT = 372, 168
LEFT, RIGHT, TOP, BOTTOM = 56, 8, 10, 24
BAND = 2.0
"""Standard deviations between runs, to both sides of their mean."""


def chart(known: MetricReference, tonight: Series | None, steps: int, word: str) -> Markup:
    """One metric of a stage over its windows.

    Args:
        known: the reference's.
        tonight: None where the run does not have it.
        steps: planned, of the stage.
        word: verdict, which gives tonight's line its colour.
    """
    centres = [float(part.mean()) + 1 for part in np.array_split(np.arange(steps), len(known.mean))]
    mean, spread = np.asarray(known.mean), np.nan_to_num(np.asarray(known.spread))
    now = np.full(len(mean), math.nan) if tonight is None or len(tonight.windows) != len(mean) else np.asarray(tonight.windows)
    now = np.where(np.isfinite(now), now, math.nan)
    shown = np.concatenate([mean - BAND * spread, mean + BAND * spread, now])
    low, high = float(np.nanmin(shown)), float(np.nanmax(shown))
    margin = 0.06 * (high - low) or max(0.05 * abs(high), 1e-3)
    low, high = low - margin, high + margin

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - 1) / max(steps - 1, 1)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    def points(values: Sequence[float]) -> list[tuple[float, float]]:
        return [(x(step), y(value)) for step, value in zip(centres, values, strict=True) if math.isfinite(value)]

    upper, lower = points((mean + BAND * spread).tolist()), points((mean - BAND * spread).tolist())
    parts = [
        *(_tick_y(y(tick), _number(tick, high - low)) for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high),
        *(_tick_x(x(tick), f"{tick:g}") for tick in MaxNLocator(4, integer=True).tick_values(1, steps) if 1 <= tick <= steps),
        f'<polygon class="band" points="{_joined([*upper, *lower[::-1]])}"/>',
        f'<polyline class="mean" points="{_joined(points(mean.tolist()))}"/>',
        f'<polyline class="now {word}" points="{_joined(points(now.tolist()))}"/>',
    ]
    last = points(now.tolist())[-1:]
    parts += [f'<circle class="now {word}" cx="{at:.1f}" cy="{height:.1f}" r="3"/>' for at, height in last]
    return Markup(f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>')


def _tick_y(height: float, label: str) -> str:
    line = f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
    return f'{line}<text class="y" x="{LEFT - 6}" y="{height:.1f}">{label}</text>'


def _tick_x(at: float, label: str) -> str:
    return f'<text class="x" x="{at:.1f}" y="{HEIGHT - BOTTOM + 13}">{label}</text>'


def _number(value: float, span: float) -> str:
    """With as many digits as the axis needs."""
    if value == 0:
        return "0"
    if max(abs(value), span) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{max(0, min(6, 1 - math.floor(math.log10(span))))}f}"


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{at:.1f},{height:.1f}" for at, height in points)

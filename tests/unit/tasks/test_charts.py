"""Charts: what is drawn is where the numbers say."""

import math
import re

import pytest

from tasks import charts
from tasks.charts import Band, Bar, Line

BASE = charts.HEIGHT - charts.BOTTOM


def rectangles(svg: str) -> list[dict[str, float | str]]:
    found = re.findall(r'<rect class="filled (\w+)" x="([^"]+)" y="([^"]+)" width="([^"]+)" height="([^"]+)"><title>([^<]*)', svg)
    return [
        {"css": css, "x": float(x), "y": float(y), "width": float(width), "height": float(height), "tip": tip}
        for css, x, y, width, height, tip in found
    ]


def polylines(svg: str) -> list[list[tuple[float, float]]]:
    found = re.findall(r'<polyline class="[^"]*" points="([^"]*)"', svg)
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in points.split())] for points in found]


def test_a_line_rises_from_corner_to_corner_and_leaves_gaps() -> None:
    """Mutations: y counted from above; NaN drawn as 0."""
    (points,) = polylines(charts.lines([Line(css="line c0", xs=[1, 2, 3, 4], ys=[0.0, math.nan, 1.0, 2.0])]))
    assert len(points) == 3
    assert [x for x, _ in points] == [charts.LEFT, pytest.approx(charts.LEFT + 2 / 3 * (charts.WIDTH - charts.LEFT - charts.RIGHT), abs=0.1), 364]
    assert points[0][1] == BASE, "what is never negative begins at the axis"
    assert points[0][1] - points[1][1] == pytest.approx(points[1][1] - points[2][1], abs=0.2)


@pytest.mark.parametrize("values", [[0.0, 0.0], [1e-4, 1e-4], [-3.0, -3.0], [math.nan, math.inf], []])
def test_lines_without_a_range_are_drawn_all_the_same(values: list[float]) -> None:
    svg = charts.lines([Line(css="line c0", xs=list(range(len(values))), ys=values)], form=charts.percent)
    assert "nan" not in svg
    assert "inf" not in svg
    labels = re.findall(r'<text class="y"[^>]*>([^<]*)', svg)
    # Mutation: `f"{100 * value:.0f} %"`; small shares are then all 0 %.
    assert len(set(labels)) == len(labels) > 1


@pytest.mark.parametrize(
    ("ticks", "texts"),
    [
        ([0.0, 0.25, 0.5], ["0", "0.25", "0.50"]),
        ([9.7e-5, 1e-4, 1.02e-4], ["9.70e-05", "1.00e-04", "1.02e-04"]),
        ([1500.0, 3000.0], ["1500", "3000"]),
        ([-0.5, 0.0], ["-0.5", "0"]),
        ([], []),
    ],
)
def test_ticks_have_the_digits_that_they_need(ticks: list[float], texts: list[str]) -> None:
    # Mutation: one digit; 0.25 is then written as 0.2, and three ticks are all 1.0e-04.
    assert charts._written(ticks) == texts


def test_a_long_line_is_thinned_to_its_means() -> None:
    (points,) = polylines(charts.lines([Line(css="line c0", xs=list(range(10_000)), ys=[float(step % 2) for step in range(10_000)])]))
    assert len(points) == charts.MOST_POINTS
    assert len({y for _, y in points}) <= 2, "each part has as many zeros as ones"


def test_a_band_lies_between_its_limits() -> None:
    svg = charts.lines([Line(css="mean", xs=[1, 2], ys=[1.0, 1.0])], bands=[Band(css="c0", xs=[1, 2], low=[0.0, 0.0], high=[2.0, 2.0])])
    (band,) = re.findall(r'<polygon class="band c0" points="([^"]*)"', svg)
    heights = [float(point.split(",")[1]) for point in band.split()]
    (line,) = polylines(svg)
    assert heights[0] == heights[1] < line[0][1] < heights[2] == heights[3]


def test_bars_are_as_high_as_their_values_and_names_are_escaped() -> None:
    """Mutations: heights relative to each group; a name as it is."""
    svg = charts.bars(["a<b", "c"], {"x": [Bar(0.5, 0.4, 0.6), Bar(0.25)], "y": [None, Bar(1.0)]}, charts.percent, most=1.0)
    found = rectangles(svg)
    assert [bar["css"] for bar in found] == ["c0", "c0", "c1"]
    full = found[2]["height"]
    assert [bar["height"] / full for bar in found] == pytest.approx([0.5, 0.25, 1.0], abs=0.01)  # type: ignore[operator]
    assert found[0]["tip"] == "a&lt;b, x: 50 %"
    assert "a<b" not in svg
    (whisker,) = re.findall(r'class="whisker" d="M[\d.]+ ([\d.]+)V([\d.]+)', svg)
    low, high = map(float, whisker)
    assert (BASE - low) / full == pytest.approx(0.4, abs=0.01)
    assert (BASE - high) / full == pytest.approx(0.6, abs=0.01)


def test_stacked_parts_begin_where_the_last_one_ended() -> None:
    """Mutation: colours by the order in which parts first appear; two pages would differ."""
    found = rectangles(
        charts.stacked({"sft": {"update": 30.0}, "rl": {"generate": 60.0, "update": 20.0}}, ["generate", "update"], lambda v: f"{v:g} s")
    )
    assert [bar["css"] for bar in found] == ["c1", "c0", "c1"]
    scale = (found[1]["width"] + 1) / 60  # type: ignore[operator]
    assert [bar["width"] + 1 for bar in found] == pytest.approx([30 * scale, 60 * scale, 20 * scale], abs=0.2)  # type: ignore[operator]
    assert found[2]["x"] == pytest.approx(found[1]["x"] + found[1]["width"] + 1, abs=0.2)  # type: ignore[operator]


def test_histograms_count_each_column_over_one_axis() -> None:
    found = rectangles(charts.histograms({"first": [1.0, 1.0, 1.0, 15.9], "second": [15.9, 15.9]}, bins=16))
    told = [bar["tip"] for bar in found]
    assert told == ["first: 0 to 1, 75 % of 4", "first: 15 to 16, 25 % of 4", "second: 15 to 16, 100 % of 2"] or told == [
        "first: 1 to 2, 75 % of 4",
        "first: 15 to 16, 25 % of 4",
        "second: 15 to 16, 100 % of 2",
    ]
    # The same length at the same height; widths relative to the column's longest bar.
    assert found[1]["y"] == found[2]["y"]
    assert found[0]["width"] == pytest.approx(found[2]["width"])
    assert found[1]["width"] / found[0]["width"] == pytest.approx(1 / 3, abs=0.01)  # type: ignore[operator]


@pytest.mark.parametrize("columns", [{}, {"a": []}, {"a": [0.0]}])
def test_nothing_to_count_is_no_error(columns: dict[str, list[float]]) -> None:
    assert "nan" not in charts.histograms(columns)


def test_rounding_is_no_curve() -> None:
    """Mutation: scale the axis to it: a constant learning rate falls at both ends."""
    (points,) = polylines(charts.lines([Line(css="line c0", xs=[1, 2, 3], ys=[3e-5, 3e-5 * (1 + 1e-12), 3e-5])]))
    assert len({y for _, y in points}) == 1

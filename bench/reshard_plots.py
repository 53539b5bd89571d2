"""The pictures of bench/reshard.py."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from report import RESULTS
from reshard_page import MODELS, NAMES, middle

from tasks.plots import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, save, style

BY_PARTS = {1: BLUE, 2: GREEN, 4: PURPLE, 8: SKY}
BY_PHASE = {"transfer": BLUE, "loading": ORANGE, "packing": SKY, "proof": GREEN, "waiting": GREY}
LEGEND: dict[str, Any] = {"loc": "outside lower center", "fontsize": 11, "frameon": False, "labelcolor": INK}


def draw(results: dict[str, Any], out: str) -> None:
    """docs/results/OUT_bytes.png and OUT_seconds.png."""
    save(bytes_figure(results["bytes"]), RESULTS / f"{out}_bytes.png")
    save(seconds_figure(results["cases"]), RESULTS / f"{out}_seconds.png")


def bytes_figure(cells: list[dict[str, Any]]) -> Figure:
    """What a rank receives, over the number of ranks; a colour for each TP, and the bound as a broken line."""
    figure = Figure(figsize=(8, 4.8), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    of_one = [cell for cell in cells if cell["parts"] == 1]
    _line(axes, of_one, "gather_float32", INK, "full gather, float32")
    _line(axes, of_one, "gather_cast", ORANGE, "full gather, cast before", width=6)  # Behind TP 1, which receives as much.
    for parts, colour in BY_PARTS.items():
        _line(axes, [cell for cell in cells if cell["parts"] == parts], "planned", colour, f"planned, TP {parts}")
    for parts in BY_PARTS:
        own = [cell for cell in cells if cell["parts"] == parts]
        axes.plot([c["ranks"] for c in own], [c["bound"] / 1e9 for c in own], color=INK, linestyle=(0, (2, 2)), linewidth=1.2)
    axes.plot([], [], color=INK, linestyle=(0, (2, 2)), linewidth=1.2, label="minimum")
    axes.set_xticks(sorted({cell["ranks"] for cell in cells}))
    axes.set_ylim(0)
    axes.margins(x=0.02)
    style(axes, "Bytes that a rank receives · Qwen3, 0.5 B, bfloat16", "ranks", "GB")
    figure.legend(*axes.get_legend_handles_labels(), ncols=4, **LEGEND)
    return figure


def seconds_figure(cases: list[dict[str, Any]]) -> Figure:
    """Seconds of each way in each case, by phase; a row of axes for each type."""
    dtypes = list(dict.fromkeys(case["dtype"] for case in cases))
    most = max(sum(case["dtype"] == dtype for case in cases) for dtype in dtypes)
    letters = {way: chr(ord("a") + position) for position, way in enumerate(NAMES)}
    figure = Figure(figsize=(8, 3.6 * len(dtypes)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for axes, dtype in zip(figure.subplots(len(dtypes), squeeze=False)[:, 0], dtypes, strict=True):
        own = [case for case in cases if case["dtype"] == dtype]
        for group, case in enumerate(own):
            width = 0.84 / len(case["ways"])
            for position, (way, found) in enumerate(case["ways"].items()):
                x, bottom = group + (position - (len(case["ways"]) - 1) / 2) * width, 0.0
                for phase, seconds in middle(found).items():
                    axes.bar(x, seconds, width * 0.88, bottom=bottom, color=BY_PHASE[phase])
                    bottom += seconds
                least, largest = min(found["seconds"]), max(found["seconds"])
                axes.errorbar(x, bottom, yerr=[[max(0.0, bottom - least)], [max(0.0, largest - bottom)]], color=INK, capsize=2, linewidth=1)
                axes.annotate(letters[way], (x, 0), (0, -3), textcoords="offset points", ha="center", va="top", fontsize=10, color=INK)
        axes.set_xticks(range(len(own)), [f"{MODELS[case['model']]}\n{case['ranks']} ranks, TP {case['parts']}" for case in own])
        axes.set_xlim(-0.5, most - 0.5)
        axes.tick_params(axis="x", pad=14)
        style(axes, f"Seconds of a synchronisation · {dtype}", "", "seconds")
        axes.tick_params(axis="x", labelsize=9)
    ways = " · ".join(f"{letters[way]}: {NAMES[way]}" for way in cases[0]["ways"])
    handles = [Patch(color=colour, label=phase) for phase, colour in BY_PHASE.items()]
    figure.legend(handles=handles, ncols=len(handles), title=ways, title_fontsize=11, **LEGEND).get_title().set_color(INK)
    return figure


def _line(axes: Axes, cells: list[dict[str, Any]], key: str, colour: str, label: str, width: float = 2.2) -> None:
    axes.plot([c["ranks"] for c in cells], [c[key] / 1e9 for c in cells], color=colour, linewidth=width, marker="o", markersize=4, label=label)

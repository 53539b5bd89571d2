"""A recorded step as one page of HTML, to be opened from a file: numbers, the dataflow, a timeline and a table. Nothing is loaded from elsewhere.

All positions are computed here; the page's script only adds tooltips, highlights and sorting, and the page can be read without it.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from engine.control.trace import ControllerSpan, Interval, Lane, Operation, Trace, Work, covered, lanes, rows
from engine.control.trace_graph import CHARACTER, Box, Graph, Line, layout

ROLES = ("actor", "critic", "reference", "reward")
"""Always have the same colours; other roles take those that are left, in order of their first call."""
COLOURS = 8
BAR, SPACE = 22, 3
"""Height of a bar in the timeline and what is between two rows, in pixels."""
LETTER = 7.1
"""Mean width in the bars' font, in pixels, generously."""


def to_html(trace: Trace) -> str:
    """The page, as text. Every name in it is escaped, and its content policy lets nothing in from outside."""
    colours = _colours(trace)
    title = f"{trace.stage} · step {trace.step}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{escape(title)}</title><style>{_file("trace_page.css")}</style></head><body>
<header><div><p class="kicker">Dataflow of one training step, as it ran</p><h1>{escape(trace.stage)} <span>step {trace.step}</span></h1></div>
<ul class="legend" aria-label="roles">{legend(trace)}<li class="controller"><i></i>controller</li></ul></header>
<main>{_numbers(trace)}
<section><h2>Dataflow</h2><p class="note">A line is a result that became an argument; its width and label are bytes. Dashed: no argument, only
what the operator before left in the worker. Point at a box to see what it depends on.</p>
<div class="scroll">{graph(trace)}</div></section>
<section><h2>Timeline</h2><p class="note">One lane for each process; seconds since the step began.</p>{_timeline(trace, colours)}</section>
<section><h2>Operators</h2><p class="note">Seconds: how long at least one rank was at work. Bytes: sums over ranks and calls.</p>
<div class="scroll">{_table(trace, colours)}</div></section></main>
<script>{_file("trace_page.js")}</script></body></html>
"""


def graph(trace: Trace) -> str:
    """The dataflow alone, as SVG for a page with the same style sheet."""
    return _graph(layout(trace), _colours(trace))


def legend(trace: Trace) -> str:
    """Items of a list that names the roles' colours."""
    return "".join(f'<li class="c{colour}"><i></i>{escape(role)}</li>' for role, colour in _colours(trace).items())


def _file(name: str) -> str:
    return resources.files("engine.control").joinpath(name).read_text(encoding="utf-8")


def _colours(trace: Trace) -> dict[str, int]:
    """Role -> number of its colour."""
    roles = list(dict.fromkeys(operation.role for operation in sorted(trace.operations, key=lambda one: one.id)))
    others = itertools.cycle(range(len(ROLES), COLOURS))
    return {role: ROLES.index(role) if role in ROLES else next(others) for role in roles}


def human_bytes(count: float) -> str:
    """`3.4 MB`, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.{0 if unit == 'B' or count >= 99.5 else 1}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(seconds: float) -> str:
    """`12.3 s`, `45 ms`; three digits."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.{0 if seconds >= 0.0995 else 1}f} ms" if seconds else "0 s"
    return f"{seconds:.{2 if seconds < 9.995 else 1 if seconds < 99.95 else 0}f} s"


def _length(union: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in union)


def _numbers(trace: Trace) -> str:
    seconds = trace.ended - trace.started
    share = trace.controller_bytes / trace.batch_bytes if trace.batch_bytes else 0.0
    both, pair = overlap(trace)
    found = lanes(trace)
    busy = sum(_length(covered(lane.work)) for lane in found) / (len(found) * seconds) if found and seconds else 0.0
    cards = [
        (human_seconds(seconds), f"the whole step: {len(trace.operations)} calls of {len(_by_name(trace.operations))} operators"),
        (human_seconds(both), f"longest overlap: {' with '.join(pair)}" if pair else "no two operators ran side by side"),
        (f"{100 * busy:.0f} %", f"of the time a process is at work, mean of {len(found)} processes"),
        (
            "under 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.{1 if share < 0.1 else 0}f} %",
            f"of the bytes went through the controller: {human_bytes(trace.controller_bytes)} of {human_bytes(trace.batch_bytes)}",
        ),
    ]
    return "<dl>" + "".join(f"<div><dd>{number}</dd><dt>{escape(meaning)}</dt></div>" for number, meaning in cards) + "</dl>"


def overlap(trace: Trace) -> tuple[float, tuple[str, ...]]:
    """(seconds, names) of the two operators that ran side by side the longest; (0, ()) where none did."""
    unions = {name: covered([span for one in calls for span in one.spans]) for name, calls in _by_name(trace.operations).items()}
    longest: tuple[float, tuple[str, ...]] = 0.0, ()
    for one, other in itertools.combinations(unions, 2):
        seconds = sum(max(0.0, min(end, until) - max(start, since)) for start, end in unions[one] for since, until in unions[other])
        longest = max(longest, (seconds, (one, other)), key=lambda found: found[0])
    return longest


def _by_name(operations: Iterable[Operation]) -> dict[str, list[Operation]]:
    named: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        named[operation.name].append(operation)
    return named


# -- the dataflow


def _graph(graph: Graph, colours: dict[str, int]) -> str:
    widest = max((line.bytes for line in graph.lines), default=0) or 1
    size = f'width="{graph.width:.0f}" height="{graph.height:.0f}" viewBox="0 0 {graph.width:.0f} {graph.height:.0f}"'
    lines = "".join(_line(graph, line, 1 + 5 * math.sqrt(line.bytes / widest), colours) for line in graph.lines)
    boxes = "".join(_box(number, box, colours) for number, box in enumerate(graph.boxes))
    style = f"max-width: {1.15 * graph.width:.0f}px; min-width: {0.75 * graph.width:.0f}px"
    return f'<svg class="graph" {size} style="{style}" role="group" aria-label="dataflow">{lines}{boxes}</svg>'


def _line(graph: Graph, line: Line, width: float, colours: dict[str, int]) -> str:
    source, target = graph.boxes[line.source], graph.boxes[line.target]
    x, y = line.points[0]
    path = f"M{x:.1f} {y:.1f}"
    for number, (end, height) in enumerate(line.points[1:]):
        if number % 2:
            x, y = end, height
            path += f"H{x - (7 if number == len(line.points) - 2 else 0):.1f}"
        else:
            middle = (x + end) / 2
            x, y = end, height
            path += f"C{middle:.1f} {line.points[number][1]:.1f} {middle:.1f} {y:.1f} {x:.1f} {y:.1f}"
    tip = f"{source.name} → {target.name}"
    if line.edges:
        labels = ", ".join(sorted({edge.label for edge in line.edges if edge.label}))
        tip += f"\n{human_bytes(line.bytes)}" + (f": {labels}" if labels else "")
    else:
        tip += "\nwhat the worker remembers"
    label_x, label_y = label_place(line)
    text = human_bytes(line.bytes)
    half = 3.5 * len(text) + 3
    label = f'<rect x="{label_x - half:.1f}" y="{label_y - 7:.1f}" width="{2 * half:.1f}" height="14" rx="4"/>' if line.edges else ""
    label += f'<text x="{label_x:.1f}" y="{label_y:.1f}">{text}</text>' if line.edges else ""
    colour = colours[source.operations[0].role]
    kind = "" if line.edges else " waits"
    return (
        f'<g class="edge c{colour}{kind}" data-source="{line.source}" data-target="{line.target}" data-tip="{escape(tip)}">'
        f'<title>{escape(tip)}</title><path class="wide" d="{path}"/><path class="line" style="stroke-width:{width:.1f}" d="{path}"/>'
        f'<path class="head" d="M{x:.1f} {y:.1f}l-9 -5v10z"/>{label}</g>'
    )


def label_place(line: Line) -> tuple[float, float]:
    """The middle of a line's label, in front of its arrow."""
    (start, y), (end, _) = line.points[-2:]
    return (start + end - 9) / 2, y


def _box(number: int, box: Box, colours: dict[str, int]) -> str:
    spans = [span for operation in box.operations for span in operation.spans]
    seconds = _length(covered(spans))
    calls, ranks = len(box.operations), len({span.rank for span in spans})
    facts = human_seconds(seconds) if spans else "has not run"
    facts += f" · {calls} calls" if calls > 1 else f" · {ranks} rank{'s' if ranks > 1 else ''}" if spans else ""
    tip = f"{box.name}{f' × {calls}' if calls > 1 else ''}\n" + "\n".join(
        (
            f"{human_seconds(seconds)} on {ranks} rank{'' if ranks == 1 else 's'}",
            f"pool {', '.join(sorted({one.pool for one in box.operations}))}, {', '.join(sorted({one.device for one in box.operations}))}",
            f"{human_bytes(sum(span.bytes_in for span in spans))} in, {human_bytes(sum(span.bytes_out for span in spans))} out",
        )
    )
    fits = int((box.width - 16) / CHARACTER)
    role, operator = (text if len(text) <= fits else text[: fits - 1] + "…" for text in (box.operations[0].role, box.operations[0].operator))
    x, y = box.x + box.width / 2, box.y + box.height / 2
    return (
        f'<g class="box c{colours[box.operations[0].role]}" tabindex="0" role="img" data-box="{number}" data-name="{escape(box.name)}" '
        f'data-tip="{escape(tip)}" aria-label="{escape(tip)}"><title>{escape(tip)}</title>'
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="9"/>'
        f'<text class="role" x="{x:.1f}" y="{y - 18:.1f}">{escape(role)}</text>'
        f'<text class="name" x="{x:.1f}" y="{y - 1:.1f}">{escape(operator)}</text>'
        f'<text x="{x:.1f}" y="{y + 18:.1f}">{facts}</text></g>'
    )


# -- the timeline


def _timeline(trace: Trace, colours: dict[str, int]) -> str:
    began, seconds = trace.started, trace.ended - trace.started or 1.0
    ticks = _ticks(seconds)
    marks = "".join(f'<span style="left:{100 * tick / seconds:.3f}%">{tick:g} s</span>' for tick in ticks)
    grid = "".join(f'<i style="left:{100 * tick / seconds:.3f}%"></i>' for tick in ticks)
    body = _controller(trace.controller, began, seconds)
    for (pool, node), group in itertools.groupby(lanes(trace), key=lambda lane: (lane.pool, lane.node)):
        body += f"<h3><b>{escape(pool)}</b> on {escape(node)}</h3>" + "".join(_lane(lane, began, seconds, colours) for lane in group)
    return f'<div class="timeline"><div class="axis">{marks}</div><div class="lanes"><div class="grid">{grid}</div>{body}</div></div>'


def _ticks(seconds: float) -> list[float]:
    """Round seconds, at most ten steps of them; the last leaves room for its label."""
    step = 10.0 ** math.floor(math.log10(seconds / 10))
    step *= next(factor for factor in (1, 2, 5, 10) if seconds / (step * factor) <= 10)
    return [round(number * step, 9) for number in range(math.floor(0.97 * seconds / step) + 1)]


def _controller(waits: list[ControllerSpan], began: float, seconds: float) -> str:
    if not waits:
        return ""
    spread = rows(waits)
    bars = "".join(_bar(began, span, row, seconds, "controller", span.name, span.name, "") for row, spans in enumerate(spread) for span in spans)
    return _track("controller", "", "what it waited for", len(spread), bars)


def _lane(lane: Lane, began: float, seconds: float, colours: dict[str, int]) -> str:
    bars = ""
    for row, works in enumerate(lane.rows):
        for work in works:
            name = work.operation.name
            tip = f"{human_bytes(work.span.bytes_in)} in, {human_bytes(work.span.bytes_out)} out"
            bars += _bar(began, work, row, seconds, f"c{colours[work.operation.role]}", name, work.operation.operator, tip)
    ranks = ", ".join(map(str, lane.ranks))
    return _track(f"rank {ranks}", f"process {lane.process}", ", ".join(lane.roles), len(lane.rows), bars)


def _track(name: str, process: str, about: str, rows_: int, bars: str) -> str:
    height = max(34, rows_ * (BAR + SPACE) + 9)
    label = f'<div class="who" title="{escape(about)}"><span><b>{escape(name)}</b> {process}</span><small>{escape(about)}</small></div>'
    return f'<div class="lane">{label}<div class="track" style="height:{height}px">{bars}</div></div>'


def _bar(began: float, interval: Work | ControllerSpan, row: int, seconds: float, kind: str, name: str, short: str, tip: str) -> str:
    start, length = interval.started - began, max(0.0, interval.ended - interval.started)
    rank = f", rank {interval.span.rank}" if isinstance(interval, Work) else ""
    tip = f"{name}{rank}\n{human_seconds(length)}, from {start:.3f} s to {start + length:.3f} s" + (f"\n{tip}" if tip else "")
    place = f"left:{100 * start / seconds:.3f}%;width:{100 * length / seconds:.3f}%;top:{6 + row * (BAR + SPACE)}px"
    # Which of the two names is seen, or none, is for the style sheet to say: it knows how wide the bar has become.
    names = f'<b>{escape(name)}</b><b aria-hidden="true">{escape(short)}</b>'
    place += f";--long:{LETTER * len(name):.0f}px;--short:{LETTER * len(short):.0f}px"
    return f'<div class="bar {kind}" style="{place}" data-name="{escape(name)}" data-tip="{escape(tip)}" title="{escape(tip)}">{names}</div>'


# -- the table


def _table(trace: Trace, colours: dict[str, int]) -> str:
    whole = trace.ended - trace.started or 1.0
    body = ""
    for name, calls in _by_name(sorted(trace.operations, key=_first)).items():
        spans = [span for call in calls for span in call.spans]
        seconds = _length(covered(spans))
        pools = ", ".join(dict.fromkeys(call.pool for call in calls))
        sizes = [sum(span.bytes_in for span in spans), sum(span.bytes_out for span in spans)]
        counts = (len({span.rank for span in spans}), len(calls))
        body += f'<tr data-name="{escape(name)}"><th scope="row" class="c{colours[calls[0].role]}"><i></i>{escape(name)}</th><td>{escape(pools)}</td>'
        body += "".join(f'<td class="n" data-sort="{count}">{count}</td>' for count in counts)
        body += f'<td class="n share c{colours[calls[0].role]}" data-sort="{seconds}" style="--share:{100 * seconds / whole:.1f}%">'
        body += f"<span>{seconds:.3f}</span></td>"
        body += "".join(f'<td class="n" data-sort="{size}">{human_bytes(size)}</td>' for size in sizes) + "</tr>"
    columns = ("operator", "pool", "ranks", "calls", "seconds", "bytes in", "bytes out")
    head = "".join(
        f'<th scope="col"{" class=n" if number > 1 else ""}><button type="button">{name}</button></th>' for number, name in enumerate(columns)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _first(operation: Operation) -> tuple[float, int]:
    spans: Sequence[Interval] = operation.spans
    return min((span.started for span in spans), default=math.inf), operation.id

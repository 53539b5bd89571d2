"""The recorded dataflow: nothing is lost on the way to JSON, to a Chrome trace or to the page, and the drawing can be read."""

import itertools
import json
import re
from collections import Counter
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_example import example

from engine.control.trace import ControllerSpan, Edge, Operation, Span, Trace, covered, from_json, lanes, rows, to_chrome, to_json
from engine.control.trace_graph import Graph, layout
from engine.control.trace_page import human_bytes, human_seconds, label_place, overlap, to_html

names = st.one_of(st.sampled_from(["actor", "reward", "critic"]), st.text(max_size=30))
times = st.floats(1_760_000_000, 1_760_000_100)
counts = st.integers(0, 2**50)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start, end = sorted((draw(times), draw(times)))
    return Span(draw(st.integers(0, 3)), start, end, draw(counts), draw(counts), draw(st.integers(1, 5)), draw(st.sampled_from(["a", "b<c>"])))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    ids = sorted(draw(st.sets(st.integers(0, 100), max_size=14)))
    operations = [Operation(i, draw(names), draw(names), draw(names), draw(names), draw(st.lists(spans(), max_size=3)), draw(counts)) for i in ids]
    pairs = draw(st.lists(st.sampled_from(list(itertools.combinations(ids, 2))), max_size=30)) if len(ids) > 1 else []
    edges = [Edge(source, target, draw(counts), draw(names)) for source, target in pairs]
    waits = [ControllerSpan(draw(names), *sorted((draw(times), draw(times)))) for _ in range(draw(st.integers(0, 3)))]
    return Trace(draw(names), draw(st.integers(0, 999)), operations, edges, waits, draw(counts), draw(counts))


@given(trace=traces())
def test_json_round_trip(trace: Trace) -> None:
    assert from_json(to_json(trace)) == trace


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"rank":0', '"rank":0,"core":1'),  # Mutation: no `extra="forbid"`.
        ('"step":7', '"step":7,"steps":9'),
        ('"rank":0', '"ranks":0'),
        ('"rank":0', '"rank":"0"'),
        ('"step":7', '"step":7.5'),
        ('"stage":"rl",', ""),
        ('"stage":"rl"', '"stage":null'),
        ("{", ""),
        ('"source":0,"target":1', '"source":0,"target":99999'),
        ('"source":0,"target":1', '"source":1,"target":0'),  # Mutation: leave `__post_init__` out: a cycle.
        ('"id":1,', '"id":0,'),
    ],
)
def test_malformed_json_is_refused(before: str, after: str) -> None:
    operations = [Operation(number, "actor", "work", "all", "cpu", [Span(0, 1.0, 2.0, 3, 4, 5, "node")], 6) for number in (0, 1)]
    text = to_json(Trace("rl", 7, operations, [Edge(0, 1, 6, "x")], [], 1, 2))
    assert before in text
    with pytest.raises(ValueError):
        from_json(text.replace(before, after, 1))


def test_a_time_that_is_not_finite_is_refused() -> None:
    # Mutation: leave the check out: JSON would say null, and could not be read back.
    with pytest.raises(ValueError, match="finite"):
        to_json(Trace("rl", 1, [], [], [ControllerSpan("wait", 0.0, float("inf"))], 0, 0))


@given(intervals=st.lists(spans(), max_size=12))
def test_rows_and_covered(intervals: list[Span]) -> None:
    """Mutation: `<` for `<=` needs a row too many where one follows at once; sorting by end puts two at a time into one row."""
    spread = rows(intervals)
    assert Counter(id(one) for row in spread for one in row) == Counter(map(id, intervals))
    for row in spread:
        assert all(one.ended <= other.started for one, other in itertools.pairwise(row))
    # No more rows than intervals that hold at one moment, counted just as each begins (those of no length hold nothing).
    lasting = [one for one in intervals if one.ended > one.started]
    at_once = max((sum(other.started <= one.started < other.ended for other in lasting) for one in intervals), default=0)
    assert len(rows(lasting)) <= at_once
    union = covered(intervals)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(union))
    assert all(any(start <= one.started and one.ended <= end for start, end in union) for one in intervals)


@settings(deadline=None)
@given(trace=st.one_of(traces(), st.sampled_from([example(True), example(False)])))
def test_chrome_trace_is_what_perfetto_reads(trace: Trace) -> None:
    events = json.loads(to_chrome(trace))["traceEvents"]
    assert all({"ph", "name", "pid", "tid", "ts"} <= event.keys() for event in events)
    heads, timed = ([event for event in events if (event["ph"] == "M") is head] for head in (True, False))
    assert events == heads + timed
    assert all(isinstance(event[key], int) for event in events for key in ("ts", "pid", "tid"))
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)  # Mutation: do not sort.
    slices = [event for event in timed if event["ph"] == "X"]

    # Every span is there, with its length to the microsecond. Mutation: group lanes by process alone: one on two nodes is mixed up below.
    spans_ = [(operation.name, span) for operation in trace.operations for span in operation.spans] + [(wait.name, wait) for wait in trace.controller]
    expected = Counter((name, round((span.started - trace.started) * 1e6)) for name, span in spans_)
    assert Counter((event["name"], event["ts"]) for event in slices) == expected
    assert sum(event["dur"] for event in slices) == pytest.approx(sum((span.ended - span.started) * 1e6 for _, span in spans_), abs=len(spans_) + 1)

    # Slices of one thread follow each other; processes and threads have one name each.
    threads: dict[tuple[int, int], list[dict]] = {}
    for event in slices:
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for thread in threads.values():
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in itertools.pairwise(thread))  # Mutation: one row for each lane.
    named = Counter((event["name"], event["pid"], event["tid"]) for event in heads)
    assert set(named.values()) <= {1}
    assert all(("process_name", pid, 0) in named and ("thread_name", pid, tid) in named for pid, tid in threads)

    # Each edge between operations that ran is one arrow, from a moment within the one to a moment within the other, never back in time.
    ran = {operation.id for operation in trace.operations if operation.spans}
    flows = {kind: {event["id"]: event for event in timed if event["ph"] == kind} for kind in "sf"}
    assert flows["s"].keys() == flows["f"].keys() == {n + 1 for n, edge in enumerate(trace.edges) if {edge.source, edge.target} <= ran}
    for number, leaves in flows["s"].items():
        arrives, edge = flows["f"][number], trace.edges[number - 1]
        assert leaves["ts"] <= arrives["ts"]
        assert arrives["bp"] == "e"
        on = threads[leaves["pid"], leaves["tid"]]
        assert any(one["args"]["operation"] == edge.source and one["ts"] <= leaves["ts"] <= one["ts"] + one["dur"] for one in on)


def test_one_process_a_pool_and_node_and_one_for_the_controller() -> None:
    events = json.loads(to_chrome(example(split=True)))["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["controller", "train on node-0", "cpu on node-0", "value on node-1"]
    together = [set(lane.roles) for lane in lanes(example(split=False))]
    assert together == [{"actor", "critic", "reference"}] * 2 + [{"reward"}] * 2


@settings(deadline=None)
@given(trace=st.one_of(traces(), st.sampled_from([example(True), example(False)])))
def test_the_drawing_can_be_read(trace: Trace) -> None:
    """Boxes and labels do not meet, lines go from left to right and around the boxes.

    Mutation: give each slot the height that it wants; give passing lines no slot; let labels stand at the middle of their lines.
    """
    graph = layout(trace)
    assert {operation.id for box in graph.boxes for operation in box.operations} == {operation.id for operation in trace.operations}
    assert sum(len(line.edges) for line in graph.lines) == len(trace.edges)
    for box in graph.boxes:
        assert 0 <= box.x <= box.x + box.width <= graph.width
        assert -1e-6 <= box.y <= box.y + box.height <= graph.height + 1e-6
    for one, other in itertools.combinations(graph.boxes, 2):
        assert one.x != other.x or one.y + one.height <= other.y + 1e-6 or other.y + other.height <= one.y + 1e-6
    for line in graph.lines:
        source, target = graph.boxes[line.source], graph.boxes[line.target]
        assert source.x + source.width < target.x
        xs = [x for x, _ in line.points]
        assert xs == sorted(xs)
        assert (xs[0], xs[-1]) == (source.x + source.width, pytest.approx(target.x))
        assert source.y <= line.points[0][1] <= source.y + source.height
        assert target.y <= line.points[-1][1] <= target.y + target.height
        assert not crossed_boxes(graph, line.points)
        assert line.points[-2][0] <= label_place(line)[0] - 27 <= label_place(line)[0] + 27 <= target.x
    places = [label_place(line) for line in graph.lines if line.edges]
    for (x, y), (other_x, other_y) in itertools.combinations(places, 2):
        assert abs(x - other_x) > 58 or abs(y - other_y) > 13


def crossed_boxes(graph: Graph, points: list[tuple[float, float]]) -> list[str]:
    """Names of the boxes that a level piece of the line runs through; between layers, where the line bends, there are none."""
    level = [(start, end, y) for (start, y), (end, other) in itertools.pairwise(points) if y == other]
    return [
        box.name
        for box in graph.boxes
        for start, end, y in level
        if start < box.x + box.width - 1e-6 and box.x + 1e-6 < end and box.y < y < box.y + box.height
    ]


def test_layers_of_the_example() -> None:
    """Streamed calls share a box; what takes no argument follows what its role did before. Mutation: `_depths` without `waits`."""
    graph = layout(example(split=True))
    layers = {box.name: (box.layer, len(box.operations)) for box in graph.boxes}
    assert layers["actor.generate"] == (0, 1)
    assert layers["reward.prefetch"] == (0, 36)
    assert layers["actor.advantage"] == (2, 1)
    assert layers["critic.update"] == (3, 1)
    assert layers["actor.synchronise"] == (4, 1)
    assert layout(example(split=True)) == graph
    (held,) = [line for line in graph.lines if not line.edges]
    assert (graph.boxes[held.source].name, graph.boxes[held.target].name) == ("actor.update", "actor.synchronise")


class Page(HTMLParser):
    """Tags, ids of boxes and rows, and what would load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.classes: Counter[str] = Counter()
        self.named: dict[str, list[str]] = {"g": [], "tr": [], "div": []}
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.tags[tag] += 1
        self.classes.update((found.get("class") or "").split())
        if found.get("data-name") is not None:
            self.named[tag].append(str(found["data-name"]))
        self.loads += [name for name in found if name in ("src", "href", "srcset", "action") or name.startswith("on")]


@pytest.mark.parametrize("split", [True, False])
def test_the_page_shows_everything(split: bool) -> None:
    trace = example(split)
    text = to_html(trace)
    page = Page(text)
    operators = {operation.name for operation in trace.operations}
    assert set(page.named["g"]) == set(page.named["tr"]) == operators
    bars = [(operation.name, span) for operation in trace.operations for span in operation.spans]
    assert Counter(page.named["div"]) == Counter([name for name, _ in bars] + [wait.name for wait in trace.controller])  # Mutation: a span left out.
    assert page.classes["edge"] == len({(edge.source, edge.target) for edge in trace.edges}) + 1
    assert "rl · step 7" in text
    assert "41.2 kB of 19.9 MB" in text  # 41216 of 9437184 + 4096 + 8192 + 3 * 2097152 + 640 + 4194304 + 36 * 256 + 3 * 320 bytes
    assert "0.2 %" in text
    assert page.loads == []
    assert not re.search(r"https?:|@import|url\(|@font-face", text)  # Mutation: a font or a script from the net.


@settings(deadline=None, max_examples=30)
@given(trace=traces())
def test_every_trace_has_a_page(trace: Trace) -> None:
    page = Page(to_html(trace))
    assert page.tags["tr"] == 1 + len({operation.name for operation in trace.operations})


def test_names_are_escaped() -> None:
    """Mutation: leave any `escape` out."""
    evil = "<img src=x onerror=alert(1)>\"'&"
    span = Span(0, 1.0, 2.0, 1, 1, 1, evil)
    operations = [Operation(number, evil, evil, evil, evil, [span], 1) for number in (0, 1, 2)]
    trace = Trace(evil, 1, operations, [Edge(0, 1, 1, evil)], [ControllerSpan(evil, 1.0, 2.0)], 1, 1)
    page = Page(to_html(trace))
    assert page.tags["img"] == 0
    assert page.loads == []
    assert set(page.named["tr"]) == {f"{evil}.{evil}"}


def test_overlap() -> None:
    """generate runs 0..4 and 6..8, prefetch 3..7: together 1 + 1 seconds. Mutation: from the first start to the last end it would be 4."""

    def work(number: int, operator: str, *times: tuple[float, float]) -> Operation:
        return Operation(number, "r", operator, "p", "cpu", [Span(0, start, end, 0, 0, number, "n") for start, end in times], 0)

    operations = [work(0, "generate", (0, 4), (6, 8)), work(1, "prefetch", (3, 7)), work(2, "prefetch", (3, 5)), work(3, "alone", (9, 10))]
    assert overlap(Trace("rl", 1, operations, [], [], 0, 0)) == (2.0, ("r.generate", "r.prefetch"))
    assert overlap(Trace("rl", 1, operations[3:], [], [], 0, 0)) == (0.0, ())


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_400, "99.4 kB"),
        (99_600, "100 kB"),
        (999_499, "999 kB"),
        (999_600, "1.0 MB"),
        (10**13, "10.0 TB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (0.0421, "42.1 ms"), (0.42, "420 ms"), (0.9996, "1.00 s"), (9.996, "10.0 s"), (123.4, "123 s")]
)
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text

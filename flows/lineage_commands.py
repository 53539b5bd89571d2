"""`almanac lineage`, `diff`, `report` and `compare`: their arguments, and what they print."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from flows.terminal import plain_console


def add(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the verbs by the command's own `verb`."""
    traced = verb("lineage", lineage, "from what a run or a model was made: code, data and weights by their hashes, up to the metric")
    traced.add_argument("name", nargs="?", default="latest", metavar="RUN|MODEL", help="run id, latest (the default), or the directory of a model")
    compared = verb("diff", diff, "what differs between two runs, beside what came out")
    compared.add_argument("then", metavar="RUN", help="run id, or latest")
    compared.add_argument("now", metavar="RUN", help="run id, or latest")
    reported = verb("report", report, "the page of a run, written again: report.html beside its record")
    reported.add_argument("run", nargs="?", default="latest", metavar="RUN", help="run id, or latest (the default)")
    beside = verb("compare", compare, "a page that puts runs side by side")
    beside.add_argument("runs", nargs="+", metavar="RUN", help="two run ids or more; all are compared with the first")
    for added in (reported, beside):
        added.add_argument("--output", metavar="FILE", help="where the page goes")
    for added in (traced, compared):
        added.add_argument("--json", action="store_true", help="for programs")


def lineage(arguments: argparse.Namespace) -> int:
    """`almanac lineage`."""
    from tasks import lineage_tree

    run, links = lineage_tree.find(arguments.name)
    if arguments.json:
        print(json.dumps(lineage_tree.summary(run, links), indent=2))
    else:
        plain_console().print(lineage_tree.tree(run, links))
    return 0


def diff(arguments: argparse.Namespace) -> int:
    """`almanac diff`."""
    from tasks.outcomes import Pair

    pair = Pair.of(arguments.then, arguments.now)
    if arguments.json:
        print(json.dumps(pair.summary(), indent=2))
    else:
        plain_console().print(pair.table())
    return 0


def report(arguments: argparse.Namespace) -> int:
    """`almanac report`: prints where the page lies."""
    from tasks import page, record, run_report
    from tasks.outcomes import Outcome

    outcome = Outcome.of(record.load(arguments.run))
    path = Path(arguments.output) if arguments.output else run_report.path(outcome.record.run)
    page.write(path, run_report.to_html(outcome))
    print(path)
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """`almanac compare`: prints where the page lies."""
    from tasks import compare_page, page, record
    from tasks.outcomes import Outcome

    outcomes = [Outcome.of(record.load(run)) for run in arguments.runs]
    if len({one.record.run for one in outcomes}) < 2:
        raise ValueError(f"{outcomes[0].record.run} alone cannot be compared; name another run beside it")
    path = Path(arguments.output) if arguments.output else compare_page.path(outcomes)
    page.write(path, compare_page.to_html(outcomes))
    print(path)
    return 0

"""`almanac lineage` and `almanac diff`: their arguments, and what they print."""

import argparse
import json
from collections.abc import Callable

from flows.terminal import plain_console


def add(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the verbs by the command's own `verb`."""
    traced = verb("lineage", lineage, "from what a run or a model was made: code, data and weights by their hashes, up to the metric")
    traced.add_argument("name", nargs="?", default="latest", metavar="RUN|MODEL", help="run id, latest (the default), or the directory of a model")
    compared = verb("diff", diff, "what differs between two runs, beside what came out")
    compared.add_argument("then", metavar="RUN", help="run id, or latest")
    compared.add_argument("now", metavar="RUN", help="run id, or latest")
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

"""Great Expectations judges facts about a data set, in a process of its own: python -m tasks.expectations DIRECTORY

The library takes seconds to import and 150 MB, which no training process should pay for. The directory holds `suites.json` and a parquet file with
facts for each suite; left beside them are `results.json` and, for each suite, a page of Data Docs. Those pages want scripts and styles from six
addresses and show nothing but bare text without them, so they are made to stand alone.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

SUITES, RESULTS, DOCS = "suites.json", "results.json", "data_docs"
EXAMPLES = 10
"""Failing rows that a result names."""
SECONDS = 600
_STYLE = """<style>
body { font: 14px/1.45 system-ui, sans-serif; color: #1f2328; margin: 0 auto; max-width: 1100px; padding: 16px; }
table { border-collapse: collapse; width: 100%; }
td, th { border: 1px solid #d0d7de; padding: 4px 8px; text-align: left; vertical-align: top; }
ul { padding-left: 20px; } .sticky { display: none; } .card,
.ge-section { border: 1px solid #d0d7de; border-radius: 6px; padding: 12px; margin: 12px 0; }
.text-danger, .fa-times { color: #b42318; }
.text-success, .fa-check-circle { color: #1a7f37; } .alert-danger { background: #fdecea; padding: 4px 8px; }
.fa-check-circle::before { content: "\\2713"; } .fa-times::before { content: "\\2717"; } a { color: #0550ae; }
@media print { body { max-width: none; } }
</style>"""


@dataclass(frozen=True, slots=True)
class Expectation:
    """One thing that is asked of the facts."""

    check: str
    """What people call it."""
    type: str
    """Class of `great_expectations.expectations`."""
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What Great Expectations said."""

    suite: str
    check: str
    success: bool
    observed: Any
    """The value that was measured, of an expectation about the whole; else None."""
    failing: int
    """Rows."""
    fraction: float
    """Of the rows, failing."""
    examples: Sequence[Mapping[str, Any]]
    """Some failing rows: row number, and the value."""


def judge(suites: Mapping[str, Sequence[Expectation]], facts: Mapping[str, pd.DataFrame], directory: Path) -> list[Result]:
    """Runs the suites, each on the facts of its name, which have a column `row`; leaves the pages in `directory / DOCS`.

    Raises:
        RuntimeError: Great Expectations failed, or evaluated nothing; with the end of what it said.
    """
    (directory / SUITES).write_text(json.dumps({name: [asdict(one) for one in suite] for name, suite in suites.items()}))
    for name in suites:
        facts[name].to_parquet(directory / f"{name}.parquet")
    # Where this project is found by a path of the caller's, it is found there too.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "GX_ANALYTICS_ENABLED": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "tasks.expectations", str(directory)], env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"Great Expectations ended with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    results = [Result(**fields) for fields in json.loads((directory / RESULTS).read_text())]
    for name in [SUITES, RESULTS, *(f"{name}.parquet" for name in suites)]:
        (directory / name).unlink()
    return results


def run(directory: Path) -> None:
    """The other side of `judge`."""
    import great_expectations as gx
    from great_expectations import expectations as kinds
    from great_expectations.checkpoint import UpdateDataDocsAction
    from great_expectations.data_context.types.base import ProgressBarsConfig

    suites = {name: [Expectation(**fields) for fields in suite] for name, suite in json.loads((directory / SUITES).read_text()).items()}
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    site = directory / "site"
    store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(site.resolve())}
    context.add_data_docs_site("docs", {"class_name": "SiteBuilder", "store_backend": store})
    source = context.data_sources.add_pandas("facts")
    results: list[Result] = []
    for name, suite in suites.items():
        definition = gx.ValidationDefinition(
            name=name,
            data=source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("whole"),
            suite=context.suites.add(
                gx.ExpectationSuite(name=name, expectations=[getattr(kinds, one.type)(**one.arguments, meta={"check": one.check}) for one in suite])
            ),
        )
        checkpoint = gx.Checkpoint(
            name=name,
            validation_definitions=[context.validation_definitions.add(definition)],
            actions=[UpdateDataDocsAction(name="docs", site_names=["docs"])],
            result_format={"result_format": "COMPLETE", "unexpected_index_column_names": ["row"], "partial_unexpected_count": EXAMPLES},
        )
        found = context.checkpoints.add(checkpoint).run(batch_parameters={"dataframe": pd.read_parquet(directory / f"{name}.parquet")})
        ((_, validation),) = found.run_results.items()
        results += [_result(name, one) for one in validation.results]
    # A suite that lost its expectations on the way would pass whatever the data are.
    missing = {(name, one.check) for name, suite in suites.items() for one in suite} - {(one.suite, one.check) for one in results}
    if missing or not results:
        raise RuntimeError(f"nothing was evaluated of {sorted(missing) or 'any suite'}")
    pages = directory / DOCS
    pages.mkdir()
    for file in (site / "validations").rglob("*.html"):
        name = file.relative_to(site / "validations").parts[0]
        (pages / f"{name}.html").write_text(standing_alone(file.read_text(encoding="utf-8")), encoding="utf-8")
    shutil.rmtree(site)
    (directory / RESULTS).write_text(json.dumps([asdict(one) for one in results], default=str))


def _result(suite: str, found: Any) -> Result:
    # Of the expectation itself, or by metric that it needs.
    told = found.exception_info or {}
    for info in [told] if "raised_exception" in told else told.values():
        if info.get("raised_exception"):
            raise RuntimeError(f"{suite}, {found.expectation_config.meta['check']}: {info['exception_message']}")
    values = found.result
    arguments = found.expectation_config.kwargs
    examples = [
        {"row": int(entry["row"]), "value": entry.get(arguments.get("column"))} for entry in values.get("partial_unexpected_index_list") or []
    ]
    return Result(
        suite=suite,
        check=found.expectation_config.meta["check"],
        success=bool(found.success),
        observed=values.get("observed_value"),
        failing=int(values.get("unexpected_count") or 0),
        fraction=float(values.get("unexpected_percent_total") or values.get("unexpected_percent") or 0.0) / 100,
        examples=examples,
    )


def standing_alone(page: str) -> str:
    """A page of Data Docs that needs nothing from elsewhere: no scripts and buttons that need them, no fetched pictures, and styles of our own."""
    dropped = (
        r"<script\b.*?</script>",
        r"<style\b.*?</style>",
        r"<footer\b.*?</footer>",
        r"<link\b[^>]*>",
        r"<img\b[^>]*>",
        r'<a\b[^>]*"https?://.*?</a>',
    )
    for tag in dropped:
        page = re.sub(tag, "", page, flags=re.DOTALL)
    page = re.sub(r'<a\b[^>]*href="[./]*expectations/[^>]*>(.*?)</a>', r"\1", page, flags=re.DOTALL)
    page = re.sub(r'href="[./]*index\.html"', 'href="../index.html"', page)
    return page.replace("</head>", f"{_STYLE}</head>", 1)


if __name__ == "__main__":
    run(Path(sys.argv[1]))

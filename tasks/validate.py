"""Whether a prepared data set is fit to be trained on: python -m tasks.validate recipe=NAME [key=value ...]

Facts about its rows (`tasks.facts`, `tasks.answers`) are judged by a suite of Great Expectations for each split (`tasks.expectations`). Every version
of a data set is validated once: verdict, page and a summary of the facts, which the next version is compared with, stay in `data/NAME.quality/`.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pyarrow import parquet

from engine.atomic import atomic_directory
from engine.config import RewardConfig
from engine.prompts import Prompt
from tasks import facts, fingerprint, page, quality_page, readers, workspace
from tasks.answers import graded
from tasks.config import RecipeConfig
from tasks.config_data import ChecksConfig, DataConfig
from tasks.data import PROMPT_SPLITS, PreparedData, load_conversations, load_prompts
from tasks.data_error import DataError
from tasks.data_files import read_prompts
from tasks.expectations import Expectation, Result, judge
from tasks.mapping import bare
from tasks.record import now

CODE = ("engine/rewards", "tasks/answers.py", "tasks/expectations.py", "tasks/facts.py", "tasks/validate.py")
"""Whose source a verdict depends on."""
SUMMARY, PAGE, MEASURES = "summary.json", "index.html", "whole_set"
EVALUATED = ("validation", "test")
_COMPARED = ("data_source", "difficulty", "language", "prompt_tokens")
_SHORT = 60
"""Characters of a value in a problem."""

_KEYS = {
    "rows": ("minimum_rows", "rows"),
    "duplicates": ("duplicate_fraction", "rows have the content of another row"),
    "contamination": ("contaminated_fraction", "rows share a run of words with what is learnt from"),
    "answers": ("unreadable_fraction", "ground truths earn nothing from the reward that grades them"),
    "language": ("foreign_fraction", "rows are in another language"),
}
"""Check -> setting that it obeys, what failing rows are."""


@dataclass(frozen=True, slots=True)
class Validation:
    """What was found out about one version of a data set."""

    directory: Path
    """Holds the page (`index.html`), Great Expectations' Data Docs, and the summary."""
    problems: Sequence[str]
    """Of the checks that failed, a sentence each; empty where the data are fit."""
    checks: int
    """So many were evaluated."""
    reused: bool
    """The same data had been validated under the same settings."""

    def files(self) -> list[Path]:
        """All that is to be kept with a run."""
        return sorted(path for path in self.directory.rglob("*") if path.is_file())


def validate(config: RecipeConfig, ready: PreparedData) -> Validation:
    """Judges a prepared data set, or finds the verdict of before.

    Raises:
        DataError: a file of `data.checks.evaluation_files` cannot be used.
        RewardError: a reward cannot be loaded.
        RuntimeError: Great Expectations failed.
    """
    checks, kept = config.data.checks, workspace.quality_directory(config.name)
    directory = kept / _key(config, ready)
    if (directory / SUMMARY).is_file():
        return _read(directory, reused=True)
    tables = _tables(config, ready)
    comparable = _comparable(config)
    before = _last_version(kept, comparable, ready.digests)
    summary: dict[str, Any] = {"made": now(), "recipe": config.name, "comparable": comparable, "compared_with": before and before["made"]}
    summary |= {"digests": ready.digests, "rows": ready.rows, "dropped": ready.dropped, "shares": {split: _shares(tables[split]) for split in tables}}
    measures = _measures(summary, before)
    tables[MEASURES] = pd.DataFrame({"row": [0], **{name: [value] for name, value in measures.items()}})
    with atomic_directory(directory) as fresh:
        results = judge(_suites(config, tables, measures), tables, fresh)
        problems = [_problem(result, checks, measures) for result in results if not result.success]
        summary |= {"problems": problems, "checks": len(results), "measures": measures}
        (fresh / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
        with page.drawing(f"the page of the verdict {directory}"):
            (fresh / PAGE).write_text(quality_page.page(summary, results), encoding="utf-8")
    return _read(directory, reused=False)


def _key(config: RecipeConfig, ready: PreparedData) -> str:
    """Names all that a verdict depends on."""
    asked = {
        "code": fingerprint.code(CODE),
        "digests": ready.digests,
        "dropped": ready.dropped,
        "comparable": _comparable(config),
        "checks": config.data.checks.model_dump(mode="json"),
        "rewards": {split: [reward.digest() for reward in these] for split, these in _rewards(config).items()},
        "max_prompt_tokens": config.max_evaluation_prompt_tokens(),
        "evaluation_files": {file: readers.digest(path) for file, path in _others(config).items() if path.exists()},
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _others(config: RecipeConfig) -> dict[str, Path]:
    return {file: workspace.root() / file for file in config.data.checks.evaluation_files}


def _tables(config: RecipeConfig, ready: PreparedData) -> dict[str, pd.DataFrame]:
    """Facts about the rows of each split, and of each further evaluation set."""
    prompts, rewards = {split: load_prompts(ready.path(split)) for split in PROMPT_SPLITS}, _rewards(config)
    learnt, evaluated = _texts(config.data, ready, prompts, _others(config))
    answers = graded([(prompts[split], rewards[split]) for split in PROMPT_SPLITS], config.data.checks.answers_checked)
    tables = {split: _prompt_facts(ready, split, prompts[split], told) for split, told in zip(PROMPT_SPLITS, answers, strict=True)}
    if "sft" in learnt:
        chats = [" ".join(message["content"] for message in chat) for chat in load_conversations(ready.path("sft"))]
        same = _rows_named(facts.duplicates(chats))
        tables["sft"] = pd.DataFrame({"row": range(len(chats)), "duplicate_of": same, "language": facts.languages(chats)})
    for split, texts in evaluated.items():
        shared = _shared(texts, learnt, config.data.checks.contamination_words)
        table = tables.get(split, pd.DataFrame({"row": range(len(texts))}))
        tables[split] = table.assign(shared_with=pd.Series(shared, dtype=object))
    return tables


def refuse(validation: Validation, source: Path) -> None:
    """Raises `DataError` where a data set is not fit."""
    if validation.problems:
        page = f"see {validation.directory / PAGE}, or go on in spite of it with data.quality=warn"
        raise DataError(source, [*validation.problems[:-1], f"{validation.problems[-1]}; {page}"])


def _read(directory: Path, *, reused: bool) -> Validation:
    summary = json.loads((directory / SUMMARY).read_text())
    return Validation(directory, summary["problems"], summary["checks"], reused)


def _rewards(config: RecipeConfig) -> dict[str, list[RewardConfig]]:
    training = [stage.reward for stage in config.generating_stages().values()]
    return {"train": training, **{split: [config.evaluation_reward] for split in EVALUATED}}


def _texts(
    config: DataConfig, ready: PreparedData, prompts: Mapping[str, Sequence[Prompt]], others: Mapping[str, Path]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """What is asked, without templates: in the splits that are learnt from, and in those and other files that are evaluated on."""

    def asked(messages: Sequence[Mapping[str, str]], split: str) -> str:
        return "\n".join(message["content"] for message in bare(messages, config.rows_of(split)) if message["role"] == "user")

    of_split = {split: [asked(prompt.messages, split) for prompt in prompts[split]] for split in PROMPT_SPLITS}
    learnt = {"train": of_split["train"]}
    if "sft" in ready.digests:
        learnt["sft"] = [asked(chat, "sft") for chat in load_conversations(ready.path("sft"))]
    evaluated = {split: of_split[split] for split in EVALUATED}
    for number, path in enumerate(others.values(), start=1):
        rows = read_prompts(path, config.shape_of_evaluations())
        evaluated[f"evaluation_file_{number}"] = [
            "\n".join(message["content"] for message in row["prompt"] if message["role"] == "user") for row in rows
        ]
    return learnt, evaluated


def _prompt_facts(ready: PreparedData, split: str, prompts: Sequence[Prompt], answers: Sequence[str | None]) -> pd.DataFrame:
    texts = ["\n".join(message["content"] for message in prompt.messages) for prompt in prompts]
    extra = parquet.read_table(ready.path(split), columns=["extra_info"]).column("extra_info").to_pylist()
    return pd.DataFrame(
        {
            "row": range(len(prompts)),
            "prompt_tokens": [info["prompt_tokens"] for info in extra],
            "duplicate_of": _rows_named(facts.duplicates(texts)),
            "answer": answers,
            "ground_truth": [prompt.ground_truth for prompt in prompts],
            "language": facts.languages(texts),
            "difficulty": [prompt.difficulty for prompt in prompts],
            "data_source": [prompt.data_source for prompt in prompts],
        }
    )


def _rows_named(rows: npt.NDArray[np.int64]) -> list[str | None]:
    return [f"row {row}" if row >= 0 else None for row in rows.tolist()]


def _shared(texts: Sequence[str], learnt: Mapping[str, Sequence[str]], words: int) -> list[str | None]:
    found: list[str | None] = [None] * len(texts)
    for split, theirs in learnt.items():
        rows = facts.shared_runs(texts, theirs, words)
        found = [before or (f"{split} row {row}" if row >= 0 else None) for before, row in zip(found, rows.tolist(), strict=True)]
    return found


def _shares(table: pd.DataFrame) -> dict[str, dict[str, float]]:
    columns = {name: table[name].tolist() for name in ("data_source", "difficulty", "language") if name in table}
    if "prompt_tokens" in table:
        columns["prompt_tokens"] = facts.length_classes(table["prompt_tokens"].tolist())
    return {name: facts.shares(values) for name, values in columns.items()}


def _comparable(config: RecipeConfig) -> str:
    """Of the settings that the rows depend on, but not of the files: versions with the same digest should look alike."""
    files = {name: "a file" for name in ("train_file", "validation_file", "test_file", "sft_file") if getattr(config.data, name) is not None}
    return config.data.content().model_copy(update=files).digest()


def _last_version(kept: Path, comparable: str, digests: Mapping[str, str]) -> dict[str, Any] | None:
    summaries = [json.loads(path.read_text()) for path in kept.glob(f"[!.]*/{SUMMARY}")]
    others = [summary for summary in summaries if summary["comparable"] == comparable and summary["digests"] != digests]
    return max(others, key=lambda summary: str(summary["made"]), default=None)


def _measures(summary: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, float]:
    """Numbers about whole splits."""
    measures: dict[str, float] = {}
    for split, dropped in summary["dropped"].items():
        if "too_long" in dropped:
            measures[f"too_long_{split}"] = dropped["too_long"] / (dropped["too_long"] + summary["rows"][split])
    measures["largest_class_train"] = max(summary["shares"]["train"]["difficulty"].values())
    if before is None:
        return measures
    for split in PROMPT_SPLITS:
        for name in _COMPARED:
            old, new = before["shares"][split][name], summary["shares"][split][name]
            measures[f"drift_{name}_{split}"] = facts.drift(old, before["rows"][split], new, summary["rows"][split])
    return measures


def _suites(config: RecipeConfig, tables: Mapping[str, pd.DataFrame], measures: Mapping[str, float]) -> dict[str, list[Expectation]]:
    checks = config.data.checks
    suites = {name: list(_expectations(table, checks, config.max_evaluation_prompt_tokens())) for name, table in tables.items() if name != MEASURES}
    suites[MEASURES] = [
        Expectation(name, "ExpectColumnMaxToBeBetween", {"column": name, "max_value": getattr(checks, _limit_of(name))}) for name in measures
    ]
    return suites


def _expectations(table: pd.DataFrame, checks: ChecksConfig, max_prompt_tokens: int) -> Iterator[Expectation]:
    """What is asked of one split, by the columns that its facts have."""
    yield Expectation("rows", "ExpectTableRowCountToBeBetween", {"min_value": checks.minimum_rows})
    if "duplicate_of" in table:
        yield Expectation("duplicates", "ExpectColumnValuesToBeNull", {"column": "duplicate_of", "mostly": 1 - checks.duplicate_fraction})
    if "shared_with" in table:
        yield Expectation("contamination", "ExpectColumnValuesToBeNull", {"column": "shared_with", "mostly": 1 - checks.contaminated_fraction})
    if "answer" in table:
        readable = {"column": "answer", "value_set": ["right"], "mostly": 1 - checks.unreadable_fraction}
        yield Expectation("answers", "ExpectColumnValuesToBeInSet", readable)
    if "prompt_tokens" in table:
        yield Expectation(
            "prompt tokens", "ExpectColumnValuesToBeBetween", {"column": "prompt_tokens", "min_value": 1, "max_value": max_prompt_tokens}
        )
    if "language" in table and checks.languages is not None:
        known = [*checks.languages, facts.UNKNOWN, facts.NO_LETTERS]
        yield Expectation(
            "language", "ExpectColumnValuesToBeInSet", {"column": "language", "value_set": known, "mostly": 1 - checks.foreign_fraction}
        )


def _limit_of(measure: str) -> str:
    """Setting that a measure must not exceed."""
    kind = measure.split("_")[0]
    return {"too": "too_long_fraction", "largest": "largest_class_fraction", "drift": "drift"}[kind]


def _problem(result: Result, checks: ChecksConfig, measures: Mapping[str, float]) -> str:
    if result.suite == MEASURES:
        key = _limit_of(result.check)
        return f"{result.check} is {measures[result.check]:.3g}, more than data.checks.{key}={getattr(checks, key):g}"
    if result.check == "rows":
        return f"{result.suite}: {result.observed} rows, fewer than data.checks.minimum_rows={checks.minimum_rows}"
    where = ", ".join(f"row {example['row']} ({str(example['value'])[:_SHORT]})" for example in result.examples)
    if result.check == "prompt tokens":
        return f"{result.suite}: {result.failing} prompts have more tokens than max_prompt_tokens: {where}"
    key, what = _KEYS[result.check]
    limit = f"data.checks.{key}={getattr(checks, key):g}"
    return f"{result.suite}: {result.failing} {what} ({100 * result.fraction:.2g} %, more than {limit}): {where}"


def main() -> None:
    """Prepares and validates the data of a recipe; exit code 1 where they are not fit, unless `data.quality` says otherwise."""
    from tasks.compose import compose
    from tasks.stages import first_weights, prepared

    try:
        config = compose(sys.argv[1:])
        ready = prepared(config, first_weights(config))
        found = validate(config, ready)
        print(f"{found.directory / PAGE}: {found.checks} checks, {len(found.problems)} failed")
        if config.data.quality == "error":
            refuse(found, ready.directory)
    except ValueError as error:
        sys.exit(str(error))
    for problem in found.problems:
        print(f"warning: {problem}")


if __name__ == "__main__":
    main()

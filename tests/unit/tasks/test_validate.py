"""A prepared data set and its faults: each one planted is found by its own check, by Great Expectations, and named with its row."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from tasks import expectations, validate
from tasks.compose import compose
from tasks.config import RecipeConfig
from tasks.data import PreparedData, prepare
from tasks.data_error import DataError
from tasks.expectations import Expectation, judge
from tasks.validate import MEASURES, Validation

Row = dict[str, Any]
WORDS = ["red", "green", "blue", "small", "large", "round", "flat", "old", "new", "warm", "cold"]


def row(i: int, answer: str | None = None) -> Row:
    thing = f"{WORDS[i % 11]} {WORDS[i // 11 % 11]}"
    text = f"How many of the {thing} boxes are there in house {i}, if each box has {i} balls?"
    return {"prompt": text, "reward_model": {"ground_truth": answer or str(i)}, "extra_info": {"difficulty": str(i % 4)}}


TRAIN, VALIDATION, TEST = [row(i) for i in range(120)], [row(i) for i in range(2000, 2012)], [row(i) for i in range(1000, 1012)]


class Sets:
    """Writes files, prepares and validates them, under a root of their own."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def config(self, **checks: Any) -> RecipeConfig:
        limits = [f"data.checks.{key}={value}" for key, value in checks.items()]
        files = [f"data.{name}_file={name}.jsonl" for name in ("train", "validation", "test")]
        return compose(["recipe=grpo_tiny", "~stages.sft", "data=files", *files, "data.data_source=mine", "data.ability=math", *limits])

    def __call__(self, train: list[Row], test: list[Row], **checks: Any) -> Validation:
        for name, rows in (("train", train), ("validation", VALIDATION), ("test", test)):
            (self.root / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        config = self.config(**checks)
        return validate.validate(config, self.prepared(config))

    def prepared(self, config: RecipeConfig) -> PreparedData:
        cap = config.max_evaluation_prompt_tokens()
        return prepare(config.data, 0, self.root / "data" / config.name, cap, lambda messages: len(messages[-1]["content"].split()))


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sets:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    return Sets(tmp_path)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root in which the good set is validated."""
    root = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALMANAC_ROOT", str(root))
        assert Sets(root)(TRAIN, TEST).problems == []
    return root


def test_a_good_set_passes_and_is_validated_once(good: Path, sets: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(good, sets.root, dirs_exist_ok=True)
    # Mutation: leave the digests, the checks or the rewards out of what a verdict is kept under.
    monkeypatch.setattr(validate, "judge", lambda *_: pytest.fail("validated again"))
    again = sets(TRAIN, TEST)
    assert (again.reused, again.problems) == (True, [])
    assert again.checks == 18
    with pytest.raises(pytest.fail.Exception):
        sets(TRAIN, TEST, minimum_rows=2)
    with pytest.raises(pytest.fail.Exception):
        sets(TRAIN[:-1], TEST)


def test_a_verdict_is_not_lost_over_its_page(sets: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation: write it without `page.drawing`; a run then fails whose data are good.
    monkeypatch.setattr(validate.quality_page, "page", lambda *_: 1 / 0)
    found = sets(TRAIN, TEST)
    assert (found.problems, validate.PAGE in {path.name for path in found.files()}) == ([], False)


FAULTS = {
    "the same row in other letters": (
        [{**TRAIN[3], "prompt": TRAIN[3]["prompt"].upper().replace(" ", "  ")}],
        r"train: 1 rows have the content of another row \(0\.55 %, more than data\.checks\.duplicate_fraction=0\): row 120 \(row 3\)",
    ),
    "a test prompt within a training prompt": (
        [{**row(7000), "prompt": f"Think well. {TEST[5]['prompt']} Answer briefly."}],
        r"test: 1 rows share a run of words with what is learnt from \(8\.3 %, .*contaminated_fraction=0\): row 5 \(train row 121\)",
    ),
    "a ground truth that cannot be read": (
        [row(7001, "$$")],
        r"train: 1 ground truths earn nothing from the reward that grades them .*unreadable_fraction=0\): row 122 \(refused\)",
    ),
    "prompts that are too long": (
        [{**row(i), "prompt": f"{row(i)['prompt']} {'more ' * 300}"} for i in range(5000, 5040)],
        r"too_long_train is 0\.179, more than data\.checks\.too_long_fraction=0\.1",
    ),
    "another language": (
        [row(i) | {"prompt": f"Найдите сумму чисел {i} и {i + 1}."} for i in range(6000, 6060)],
        r"train: 60 rows are in another language \(33 %, more than data\.checks\.foreign_fraction=0\.05\): row 123 \(ru\), .*row 132 \(ru\)$",
    ),
    "too few rows": ([], r"test: 12 rows, fewer than data\.checks\.minimum_rows=13"),
    "too few of validation": ([], r"validation: 12 rows, fewer than data\.checks\.minimum_rows=13"),
    "one class above all": ([], r"largest_class_train is 0\.251, more than data\.checks\.largest_class_fraction=0\.2"),
}


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Validation:
    """The verdict on a set with all these faults."""
    root = tmp_path_factory.mktemp("bad")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALMANAC_ROOT", str(root))
        planted = [one for rows, _ in FAULTS.values() for one in rows]
        return Sets(root)([*TRAIN, *planted], TEST, minimum_rows=13, largest_class_fraction=0.2, languages="[en]")


# Mutation: leave any expectation out of `validate._suites`, or ask it of another column.
@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found_by_its_check(fault: str, bad: Validation) -> None:
    _, message = FAULTS[fault]
    (problem,) = [problem for problem in bad.problems if re.search(message, problem)]
    assert escape(problem) in (bad.directory / "index.html").read_text()


def test_nothing_else_is_found_and_the_set_is_refused(bad: Validation) -> None:
    assert len(bad.problems) == len(FAULTS), bad.problems
    with pytest.raises(DataError, match=r"index\.html, or go on in spite of it with data\.quality=warn"):
        validate.refuse(bad, Path("data"))


# Mutation: compare with any version, or with the one that is validated; hold further sets against each other.
def test_shifted_classes_are_found_against_the_last_version_and_further_sets_against_train(good: Path, sets: Sets) -> None:
    shutil.copytree(good, sets.root, dirs_exist_ok=True)
    shifted = [{**one, "extra_info": {"difficulty": "3" if i % 5 else one["extra_info"]["difficulty"]}} for i, one in enumerate(TRAIN)]
    found = sets(shifted, TEST)
    assert [problem.split(" is ")[0] for problem in found.problems] == ["drift_difficulty_train"]
    # With another file to be held against train, and a cap below a prompt in the prepared split.
    (sets.root / "aime.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [row(8000), TRAIN[7]]))
    config = sets.config(evaluation_files="[aime.jsonl]")
    rl = config.stages["rl"].model_dump() | {"max_prompt_tokens": 17}
    found = validate.validate(RecipeConfig.model_validate(config.model_dump() | {"stages": {"rl": rl}}), sets.prepared(config))
    for message in (
        r"evaluation_file_1: 1 rows share a run of words with what is learnt from \(50 %, .*: row 1 \(train row 7\)",
        r"train: \d+ prompts have more tokens than max_prompt_tokens: row \d+ \(18\)",
    ):
        assert any(re.search(message, problem) for problem in found.problems), found.problems


def test_the_pages_stand_alone(good: Path) -> None:
    (page,) = good.glob("data/*.quality/*/index.html")
    pages = [page, *page.parent.glob("data_docs/*.html")]
    assert {one.stem for one in pages} == {"index", "train", "validation", "test", MEASURES}
    for one in pages:
        text = one.read_text()
        # Mutation: leave a tag out of `standing_alone`.
        assert not re.findall(r"""(?:src|href)=["']https?://[^"']*|<script""", text), one
        for link in re.findall(r'href="([^"#]+)"', text):
            assert (one.parent / link).is_file(), (one, link)


def test_a_suite_that_evaluates_nothing_is_an_error(tmp_path: Path) -> None:
    import pandas as pd

    facts = {"train": pd.DataFrame({"row": [0, 1], "a": [1, 2]})}
    with pytest.raises(RuntimeError, match="nothing was evaluated of"):
        judge({"train": []}, facts, tmp_path)
    with pytest.raises(RuntimeError, match="no_such_column"):
        judge({"train": [Expectation("x", "ExpectColumnMaxToBeBetween", {"column": "no_such_column", "max_value": 1})]}, facts, tmp_path)
    assert expectations.EXAMPLES == 10

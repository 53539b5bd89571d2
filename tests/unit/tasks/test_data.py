import json
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.prompts import content_hash
from tasks.chain_sums import chain_sums, partial_sums
from tasks.config_data import ChainSumConfig, DataConfig
from tasks.data import PreparedData, load_conversations, load_prompts, prepare
from tasks.data_error import DataError

SMALL = ChainSumConfig(max_terms=4, sft_rows=300, train_rows=120, validation_rows=20, test_rows=31)


def row(question: str, answer: Any = "7", **changes: Any) -> dict[str, Any]:
    columns = {
        "prompt": [{"role": "user", "content": question}],
        "data_source": "mine",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": 0, "difficulty": "easy"},
    }
    return {**columns, **changes}


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [row(f"question {i}") for i in range(start, start + count)]


def answer(question: str, text: str = "\\boxed{7}") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": text}]}


def write(path: Path, content: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pd.DataFrame(content).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(one) + "\n" for one in content))
    return str(path)


def characters(messages: Any) -> int:
    return sum(len(message["content"]) for message in messages)


def made(config: DataConfig, tmp_path: Path, *, limit: int = 200, seed: int = 0, counted_by: str = "") -> PreparedData:
    return prepare(config, seed, tmp_path / "data" / "set", limit, characters, counted_by)


def refused(content: list[dict[str, Any]], tmp_path: Path) -> str:
    """The error that these training rows give; nothing may be left behind."""
    config = DataConfig(train_file=write(tmp_path / "train.jsonl", content))
    with pytest.raises(DataError) as error:
        made(config, tmp_path)
    assert not (tmp_path / "data").exists()
    return str(error.value)


# --- chained sums


def test_generated_splits_have_exactly_the_columns_of_the_field(tmp_path: Path) -> None:
    data = made(DataConfig(chain_sum=SMALL), tmp_path)
    assert sorted(file.name for file in data.directory.iterdir()) == [
        "manifest.json",
        "sft.parquet",
        "test.parquet",
        "train.parquet",
        "validation.parquet",
    ]
    assert data.rows == {"sft": 300, "train": 120, "validation": 20, "test": 31}
    for split in ("train", "validation", "test"):
        table = pd.read_parquet(data.path(split))
        assert list(table.columns) == ["prompt", "data_source", "ability", "reward_model", "extra_info"]
        assert [info["index"] for info in table.extra_info] == list(range(len(table)))
        assert {info["split"] for info in table.extra_info} == {split}
    assert list(pd.read_parquet(data.path("sft")).columns) == ["messages"]


# Mutation: compute the ground truth by another rule than left to right, or take the difficulty from the largest number of terms.
def test_generated_prompts_are_bare_sums_with_their_totals(tmp_path: Path) -> None:
    for prompt in load_prompts(made(DataConfig(chain_sum=SMALL), tmp_path).path("train")):
        (message,) = prompt.messages
        expression = message["content"].removesuffix("=")
        assert str(eval(expression)) == prompt.ground_truth
        assert prompt.difficulty == str(sum(character.isdigit() for character in expression))
        assert (prompt.data_source, prompt.id) == ("chain_sum", content_hash(prompt.messages))


# Mutation: take each split from a stream of its own.
def test_held_out_sums_stand_nowhere_else_and_none_twice(tmp_path: Path) -> None:
    data = made(DataConfig(chain_sum=SMALL), tmp_path)
    ids = {split: [prompt.id for prompt in load_prompts(data.path(split))] for split in ("train", "validation", "test")}
    ids["sft"] = [content_hash(chat[:1]) for chat in load_conversations(data.path("sft"))]
    assert all(len(set(split)) == len(split) for split in ids.values())
    for held_out, others in (("test", ("train", "validation", "sft")), ("validation", ("train", "sft"))):
        assert not any(set(ids[held_out]) & set(ids[other]) for other in others)


def test_sums_are_spread_evenly_as_far_as_there_are_different_ones() -> None:
    splits = chain_sums(ChainSumConfig(max_terms=4, sft_rows=900, train_rows=600, validation_rows=150, test_rows=240), 0)
    counts = {name: Counter(one["extra_info"]["difficulty"] for one in splits[name]) for name in ("train", "validation", "test")}
    # 10 * 2 * 10 = 200 sums of two terms; test and validation may take a quarter, 50, of them, and 100 are left for train.
    assert counts["test"] == {"2": 50, "3": 95, "4": 95}
    assert counts["validation"] == {"2": 50, "3": 50, "4": 50}
    assert counts["train"] == {"2": 100, "3": 250, "4": 250}


# Mutation: write the first number too, or the totals without the last.
def test_worked_answers_write_the_totals_after_each_sign() -> None:
    assert partial_sums("4 + 3 - 2") == ["7", "5"]
    assert partial_sums("0 - 9 - 9 + 1") == ["-9", "-18", "-17"]
    boxed = chain_sums(SMALL.model_copy(update={"boxed_fraction": 1.0}), 0)["sft"]
    plain = chain_sums(SMALL.model_copy(update={"boxed_fraction": 0.0}), 0)["sft"]
    lines = chain_sums(SMALL.model_copy(update={"boxed_fraction": 1.0, "answer_line": True}), 0)["sft"]
    for in_box, bare, line in zip(boxed, plain, lines, strict=True):
        expression = in_box["messages"][0]["content"].removesuffix("=")
        totals = partial_sums(" ".join(expression))
        assert in_box["messages"][1]["content"] == f"<think>{' '.join(totals)}</think>\\boxed{{{eval(expression)}}}"
        assert bare["messages"][1]["content"] == f"<think>{' '.join(totals)}</think>{totals[-1]}"
        assert line["messages"][1]["content"] == f"<think>{' '.join(totals)}</think>Answer: {totals[-1]}"


# Mutation: draw once for the whole split.
def test_a_share_of_the_answers_stands_in_a_box() -> None:
    answers = [row["messages"][1]["content"] for row in chain_sums(ChainSumConfig(max_terms=4, boxed_fraction=0.25), 0)["sft"]]
    boxed = sum("\\boxed{" in answer for answer in answers)
    # Binomial: four standard deviations of the share of n rows are 4 * sqrt(0.25 * 0.75 / n).
    assert abs(boxed / len(answers) - 0.25) < 4 * (0.25 * 0.75 / len(answers)) ** 0.5


# Mutation: draw from an unseeded generator, or ignore the seed.
def test_the_seed_decides_the_sums() -> None:
    assert chain_sums(SMALL, 1) == chain_sums(SMALL, 1)
    assert chain_sums(SMALL, 1) != chain_sums(SMALL, 2)


def test_more_sums_than_there_are_are_refused(tmp_path: Path) -> None:
    config = DataConfig(chain_sum=ChainSumConfig(max_terms=2, sft_rows=100, train_rows=101, validation_rows=50, test_rows=50))
    with pytest.raises(ValueError, match=r"train_rows: 101 rows, but sums of 2 to 2 terms give at most 100 different ones"):
        made(config, tmp_path)
    assert not (tmp_path / "data").exists()


def test_the_template_is_around_every_user_message(tmp_path: Path) -> None:
    data = made(DataConfig(chain_sum=SMALL, prompt_template="{prompt} Box it."), tmp_path)
    assert all(prompt.messages[-1]["content"].endswith("= Box it.") for prompt in load_prompts(data.path("test")))
    assert all(chat[0]["content"].endswith("= Box it.") for chat in load_conversations(data.path("sft")))


# --- reuse


# Mutation: compare the hashes only, or the settings only.
def test_a_set_is_reused_until_settings_or_files_change(tmp_path: Path) -> None:
    config = DataConfig(chain_sum=SMALL)
    first = made(config, tmp_path)
    again = made(config, tmp_path)
    assert (first.reused, again.reused) == (False, True)
    assert (again.digests, again.rows, again.dropped) == (first.digests, first.rows, first.dropped)
    assert not made(config, tmp_path, seed=1).reused
    assert not made(config, tmp_path).reused
    assert not made(config, tmp_path, limit=100).reused
    assert not made(config, tmp_path, limit=100, counted_by="another tokenizer").reused
    assert not made(DataConfig(chain_sum=SMALL, prompt_template="{prompt}!"), tmp_path).reused
    assert made(config, tmp_path).digests == first.digests
    first.path("train").write_bytes(first.path("test").read_bytes())
    assert not made(config, tmp_path).reused
    (first.directory / "manifest.json").write_text("{")
    assert made(config, tmp_path).digests == first.digests


def test_a_changed_input_file_makes_the_set_anew(tmp_path: Path) -> None:
    config = DataConfig(train_file=write(tmp_path / "train.jsonl", rows(20)))
    made(config, tmp_path)
    assert made(config, tmp_path).reused
    write(tmp_path / "train.jsonl", rows(21))
    assert not made(config, tmp_path).reused


# Mutation: write into the directory itself.
def test_a_failure_leaves_the_old_set_as_it_was(tmp_path: Path) -> None:
    first = made(DataConfig(chain_sum=SMALL), tmp_path)
    with pytest.raises(DataError, match="no prompt is left"):
        made(DataConfig(chain_sum=SMALL), tmp_path, limit=1)
    assert made(DataConfig(chain_sum=SMALL), tmp_path).reused
    assert list(first.directory.parent.iterdir()) == [first.directory]


def test_a_directory_that_was_not_made_here_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "data" / "set").mkdir(parents=True)
    config = DataConfig(train_file=write(tmp_path / "data" / "set" / "train.jsonl", rows(20)))
    with pytest.raises(DataError, match="put it elsewhere"):
        made(config, tmp_path)
    with pytest.raises(DataError, match=r"has no manifest\.json"):
        made(DataConfig(chain_sum=SMALL), tmp_path)
    assert (tmp_path / "data" / "set" / "train.jsonl").exists()


# --- the user's files


@pytest.mark.parametrize("extension", [".parquet", ".jsonl"])
def test_own_files_go_in(tmp_path: Path, extension: str) -> None:
    config = DataConfig(
        train_file=write(tmp_path / f"train{extension}", rows(20)),
        test_file=write(tmp_path / f"test{extension}", [row("another", "9", source="a book")]),
        sft_file=write(tmp_path / f"sft{extension}", [answer("question 1"), answer("else")]),
        held_out_fraction=0.2,
        prompt_template="{prompt} ?",
    )
    data = made(config, tmp_path)
    assert (data.rows["train"], data.rows["validation"], data.rows["test"]) == (16, 4, 1)
    (test,) = load_prompts(data.path("test"))
    assert (test.messages, test.ground_truth, test.data_source, test.difficulty, test.index) == (
        ({"role": "user", "content": "another ?"},), "9", "mine", "easy", 0,
    )  # fmt: skip
    assert list(pd.read_parquet(data.path("train")).columns) == ["prompt", "data_source", "ability", "reward_model", "extra_info"]
    assert load_conversations(data.path("sft"))[-1] == answer("else")["messages"]


def test_without_an_sft_file_there_is_no_sft_split(tmp_path: Path) -> None:
    data = made(DataConfig(train_file=write(tmp_path / "train.jsonl", rows(20))), tmp_path)
    with pytest.raises(DataError, match=r"has no split sft; set data\.sft_file"):
        data.path("sft")


def test_relative_files_start_at_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    write(tmp_path / "train.jsonl", rows(20))
    assert made(DataConfig(train_file="train.jsonl"), tmp_path).rows["train"] == 16


# Mutation: take the first rows, or rows drawn by the seed.
def test_held_out_prompts_are_chosen_by_content(tmp_path: Path) -> None:
    chosen = []
    for content in (rows(30), rows(30)[::-1]):
        data = made(DataConfig(train_file=write(tmp_path / "train.jsonl", content)), tmp_path, seed=len(chosen))
        chosen.append({split: {prompt.id for prompt in load_prompts(data.path(split))} for split in ("train", "validation", "test")})
    assert chosen[0] == chosen[1]
    assert [len(ids) for ids in chosen[0].values()] == [24, 3, 3]
    assert len(set.union(*chosen[0].values())) == 30


# Mutation: keep SFT rows whatever was held out, or compare them with their template on.
@pytest.mark.parametrize("suffix", ["", " Box it."])
def test_sft_rows_of_prompts_that_we_hold_out_are_left_out(tmp_path: Path, suffix: str) -> None:
    conversations = [answer(f"question {i}{suffix}") for i in range(30)] + [answer(f"question 0{suffix}")]
    config = DataConfig(
        train_file=write(tmp_path / "train.jsonl", rows(30)),
        sft_file=write(tmp_path / "sft.jsonl", conversations),
        prompt_template="{prompt} Box it.",
    )
    data = made(config, tmp_path)
    assert data.dropped["sft"] == {"duplicates": 1, "held_out": 6}
    assert data.rows["sft"] == 24


# Mutation: keep all, or count them under another split.
def test_duplicates_and_long_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    content = [*rows(20), row("question 3", "8"), row("question 4"), row("x" * 300)]
    config = DataConfig(
        train_file=write(tmp_path / "train.jsonl", content),
        validation_file=write(tmp_path / "validation.jsonl", [row("v"), row("v")]),
        test_file=write(tmp_path / "test.jsonl", [row("t"), row("y" * 201)]),
    )
    data = made(config, tmp_path)
    assert data.dropped == {
        "train": {"duplicates": 2, "too_long": 1},
        "validation": {"duplicates": 1, "too_long": 0},
        "test": {"duplicates": 0, "too_long": 1},
    }
    assert data.rows == {"train": 20, "validation": 1, "test": 1}
    manifest = json.loads((data.directory / "manifest.json").read_text())
    assert manifest["files"]["train.parquet"]["dropped"] == data.dropped["train"]


def test_it_is_an_error_when_no_prompt_is_short_enough(tmp_path: Path) -> None:
    config = DataConfig(train_file=write(tmp_path / "train.jsonl", rows(20)))
    with pytest.raises(
        DataError, match=r"train\.jsonl: no prompt is left: all 16 have more than max_prompt_tokens \(9\) tokens; the shortest has 10"
    ):
        made(config, tmp_path, limit=9)
    assert not (tmp_path / "data" / "set").exists()


# Mutation: compare rows instead of content hashes, or compare after duplicates of test were dropped from train.
@pytest.mark.parametrize(
    ("held_out", "other"), [("test", "train"), ("validation", "train"), ("test", "validation"), ("test", "sft"), ("validation", "sft")]
)
def test_held_out_rows_that_stand_elsewhere_are_refused(tmp_path: Path, held_out: str, other: str) -> None:
    content = {"train": rows(20), "validation": rows(5, 100), "test": rows(5, 200)}
    copies = [row(f" {one['prompt'][0]['content']}\n") for one in content[held_out][2:4]]
    if other in content:
        content[other] += copies
    files = {f"{name}_file": write(tmp_path / f"{name}.jsonl", these) for name, these in content.items()}
    if other == "sft":
        files["sft_file"] = write(tmp_path / "sft.jsonl", [answer("x"), *[answer(copy["prompt"][0]["content"]) for copy in copies]])
    with pytest.raises(DataError) as error:
        made(DataConfig(**files), tmp_path)
    first = {"train": 20, "validation": 5, "sft": 1}[other]
    assert f"2 of its 5 {held_out} prompts also stand in {other}" in str(error.value)
    assert f"row 2 (from 0) also stands in {other}: row {first} of" in str(error.value)
    assert f"row 3 (from 0) also stands in {other}: row {first + 1} of" in str(error.value)
    assert not (tmp_path / "data").exists()


def test_too_few_prompts_to_hold_some_out_are_refused(tmp_path: Path) -> None:
    assert "its 2 different prompts are too few to take test and validation out of" in refused(rows(2), tmp_path)


# --- bad files


def bad_file(path: Path, tmp_path: Path) -> str:
    with pytest.raises(DataError) as error:
        made(DataConfig(train_file=str(path)), tmp_path)
    assert str(path) in str(error.value)
    assert not (tmp_path / "data").exists()
    return str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    assert "does not exist" in bad_file(tmp_path / "nowhere.parquet", tmp_path)
    (tmp_path / "directory.parquet").mkdir()
    assert "is a directory" in bad_file(tmp_path / "directory.parquet", tmp_path)


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_an_empty_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert "is empty (0 bytes)" in bad_file(tmp_path / name, tmp_path)


def test_a_file_without_rows(tmp_path: Path) -> None:
    pd.DataFrame(rows(1)).iloc[:0].to_parquet(tmp_path / "train.parquet")
    assert "holds no rows" in bad_file(tmp_path / "train.parquet", tmp_path)
    (tmp_path / "train.jsonl").write_text("\n \n")
    assert "holds no rows" in bad_file(tmp_path / "train.jsonl", tmp_path)


@pytest.mark.parametrize("garbage", [b"\x00\xff garbage" * 50, b"PAR1" + bytes(100) + b"PAR1", b"x"])
def test_a_file_that_is_not_parquet(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / "train.parquet").write_bytes(garbage)
    assert "is not a parquet file" in bad_file(tmp_path / "train.parquet", tmp_path)


def test_an_extension_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "train.xls").write_text("prompt,answer\n")
    assert "has the extension '.xls'; data are .parquet, .jsonl, .json, .csv, or a directory" in bad_file(tmp_path / "train.xls", tmp_path)


# Mutation: count only the lines that are not blank.
def test_broken_lines_are_named(tmp_path: Path) -> None:
    good = json.dumps(row("a")).encode()
    (tmp_path / "train.jsonl").write_bytes(b"\n".join([good, b"", b'{"prompt": [', b"[1, 2]", b"\xff\xfe", good]))
    message = bad_file(tmp_path / "train.jsonl", tmp_path)
    assert "3 problems" in message
    assert "line 3 is not JSON" in message
    assert "line 4 is not a JSON object" in message
    assert "line 5 is not JSON" in message


# --- bad rows


@pytest.mark.parametrize("column", ["prompt", "data_source", "ability", "reward_model"])
def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path, column: str) -> None:
    content = [{name: value for name, value in row(str(i), note="x").items() if name != column} for i in range(20)]
    message = refused(content, tmp_path)
    path = "reward_model.ground_truth" if column == "reward_model" else column
    assert f"lacks the column {path}; it has: " in message
    assert "note" in message.split("it has: ")[1]


PATHS = {"reward_model": "reward_model.ground_truth", "extra_info": "extra_info.difficulty"}
CELLS: list[tuple[str, Any, str]] = [
    ("prompt", None, "is null"),
    ("prompt", " ", "must be a list of messages"),
    ("prompt", 4, "must be a list of messages"),
    ("prompt", [], "must be a list of messages"),
    ("prompt", [{"role": "user"}], "must be a list of messages"),
    ("prompt", [{"role": "user", "content": " "}], "must be a list of messages"),
    ("prompt", [{"role": "user", "content": None}], "must be a list of messages"),
    ("prompt", [{"role": "assistant", "content": "7"}], "must end with a message of the user"),
    ("data_source", None, "is null"),
    ("data_source", 3, "must be text"),
    ("ability", "", "must be text"),
    ("reward_model", None, "is null"),
    ("reward_model", "rule", "must be an object"),
    ("reward_model", {"style": "rule"}, "is null"),
    ("reward_model", {"style": "rule", "ground_truth": None}, "is null"),
    ("reward_model", {"style": "rule", "ground_truth": ""}, "is empty"),
    ("reward_model", {"style": "rule", "ground_truth": " \n"}, "is empty"),
    ("reward_model", {"style": "rule", "ground_truth": float("nan")}, "is empty"),
    ("reward_model", {"style": "rule", "ground_truth": "\0"}, "is empty"),
    ("reward_model", {"style": "rule", "ground_truth": "7\0"}, "must be text without null bytes"),
    ("reward_model", {"style": "rule", "ground_truth": float("inf")}, "must be text without null bytes, or a finite number"),
    ("reward_model", {"style": "rule", "ground_truth": True}, "must be text"),
    ("reward_model", {"style": "rule", "ground_truth": ["7"]}, "must be text"),
    ("extra_info", "hard", "must be an object"),
]


# Mutation: leave a check out of `schemas.PROMPTS`, or name rows from 1.
@pytest.mark.parametrize(("column", "value", "reason"), CELLS)
def test_a_bad_cell_is_named_with_row_column_value_and_reason(tmp_path: Path, column: str, value: Any, reason: str) -> None:
    content = rows(20)
    content[13][column] = value
    message = refused(content, tmp_path)
    assert f"row 13 (from 0), column {PATHS.get(column, column)}: {reason}" in message
    assert "its value is" in message
    assert "problems" not in message  # One cell, one reason.


@pytest.mark.parametrize(("column", "value", "reason"), [cell for cell in CELLS if cell[1] is None])
def test_nulls_in_parquet_are_named_too(tmp_path: Path, column: str, value: Any, reason: str) -> None:
    content = rows(20)
    content[13][column] = value
    write(tmp_path / "train.parquet", content)
    assert f"row 13 (from 0), column {PATHS.get(column, column)}: {reason}" in bad_file(tmp_path / "train.parquet", tmp_path)


# Mutation: stop at the first problem, or show all of a thousand.
def test_all_problems_are_counted_and_ten_are_shown(tmp_path: Path) -> None:
    content = [row(f"q{i}", "" if i % 2 else "7", **({"data_source": None} if i == 4 else {})) for i in range(40)]
    message = refused(content, tmp_path)
    assert "21 problems" in message
    assert message.count("row ") == 10
    assert "row 4 (from 0), column data_source: is null" in message
    assert message.endswith("... and 11 more")


def test_bad_conversations_are_named(tmp_path: Path) -> None:
    sft = [answer("a"), {"messages": None}, {"messages": [{"role": "user", "content": "b"}]}]
    config = DataConfig(train_file=write(tmp_path / "train.jsonl", rows(20)), sft_file=write(tmp_path / "sft.jsonl", sft))
    with pytest.raises(DataError) as error:
        made(config, tmp_path)
    assert "row 1 (from 0), column messages: is null" in str(error.value)
    assert "row 2 (from 0), column messages: must end with a message of the assistant" in str(error.value)


# --- values that are taken as they are meant


@pytest.mark.parametrize(("value", "text"), [(5, "5"), (5.0, "5"), (0.5, "0.5"), (-3, "-3"), ("x = 5", "x = 5"), (10**30, "1" + "0" * 30)])
def test_numeric_ground_truths_become_text(tmp_path: Path, value: Any, text: str) -> None:
    path = Path(write(tmp_path / "train.jsonl", [row("a", value)]))
    assert load_prompts(path)[0].ground_truth == text


# Mutation: str() on every ground truth.
def test_a_number_column_with_a_hole_does_not_become_nan(tmp_path: Path) -> None:
    content = [row("a", 1.0), row("b", 2.0), row("c", None)]
    write(tmp_path / "train.parquet", content)
    with pytest.raises(DataError, match=r"row 2 \(from 0\), column reward_model\.ground_truth: is null"):
        load_prompts(tmp_path / "train.parquet")


@pytest.mark.parametrize("extension", [".parquet", ".jsonl"])
def test_json_text_stands_for_objects(tmp_path: Path, extension: str) -> None:
    texts = {"reward_model": json.dumps({"ground_truth": 4}), "extra_info": json.dumps({"difficulty": 3})}
    path = Path(write(tmp_path / f"train{extension}", [row("a", **texts)]))
    (prompt,) = load_prompts(path)
    assert (prompt.ground_truth, prompt.difficulty) == ("4", "3")


def test_a_prompt_without_difficulty_is_of_the_class_all(tmp_path: Path) -> None:
    content = [row("a", extra_info=None), row("b", extra_info={"index": 1}), row("c", extra_info={"difficulty": {"level": 3}})]
    assert {prompt.difficulty for prompt in load_prompts(Path(write(tmp_path / "train.jsonl", content)))} == {"all"}


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(lambda text: text.strip() != "" and "\0" not in text)


# Mutation: strip or re-encode what goes into the files.
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=3, max_size=6, unique_by=lambda pair: content_hash([{"role": "user", "content": pair[0]}])))
def test_text_comes_through_as_it_is(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]) -> None:
    directory = tmp_path_factory.mktemp("set")
    data = made(DataConfig(train_file=write(directory / "train.jsonl", [row(question, truth) for question, truth in pairs])), directory)
    loaded = [prompt for split in ("train", "validation", "test") for prompt in load_prompts(data.path(split))]
    assert {(prompt.messages[0]["content"], prompt.ground_truth) for prompt in loaded} == set(pairs)

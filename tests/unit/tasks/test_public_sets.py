"""The groups of conf/data for public sets, on small files in their shapes: column names and types as their cards list them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tasks.compose import choices, compose
from tasks.config_data import DataConfig, RowsConfig
from tasks.data import PreparedData, load_prompts, prepare
from tasks.data_error import DataError
from tasks.data_files import read_prompts
from tasks.workspace import conf_directory

BOX = " Let's think step by step and output the final answer within \\boxed{}."
HASHES = ' Let\'s think step by step and output the final answer after "####".'
DAPO = "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer.\n\nWhat is 2 + {i}?"
VERL = {"ability": "MATH", "data_source": "math_dapo", "reward_model": {"style": "rule-lighteval/MATH_v2"}}


def chat(text: str) -> list[dict[str, str]]:
    return [{"content": text, "role": "user"}]


# Name of the group -> (row number i in the set's shape, its prompt, its ground truth, data source, difficulty)
SETS: dict[str, Any] = {
    "gsm8k": (
        lambda i: {"question": f"{i} apples?", "answer": f"There are <<{i}*1000={i}000>>{i}000.\n#### {i},000"},
        lambda i: (f"{i} apples?{HASHES}", f"{i}000", "gsm8k", "all"),
    ),
    "math": (
        lambda i: {
            "problem": f"Find $x_{i}$.",
            "level": f"Level {i % 5 + 1}",
            "type": "Algebra",
            "solution": rf"So $x=\boxed{{\frac{{{i}}}{{2}}}}$.",
        },
        lambda i: (f"Find $x_{i}$.{BOX}", rf"\frac{{{i}}}{{2}}", "math", f"Level {i % 5 + 1}"),
    ),
    "deepscaler": (
        lambda i: {"problem": f"Find ${i}$.", "answer": f"{i}", "solution": ""},
        lambda i: (f"Find ${i}$.{BOX}", f"{i}", "deepscaler", "all"),
    ),
    "dapo_math_17k": (
        lambda i: (
            VERL
            | {
                "prompt": chat(DAPO.replace("{i}", str(i))),
                "reward_model": {"ground_truth": str(i + 2), "style": "rule"},
                "extra_info": {"index": f"a-{i}"},
            }
        ),
        lambda i: (DAPO.replace("{i}", str(i)), str(i + 2), "math_dapo", "all"),
    ),
    "skywork_or1": (
        lambda i: {
            "data_source": "train-math-deepscaler",
            "prompt": chat(f"Find {i}."),
            "ability": "math",
            "reward_model": {"ground_truth": json.dumps([rf"\sqrt{{{i}}}"]), "style": "rule"},
            "extra_info": {"index": i, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-1.5B": 16, "DeepSeek-R1-Distill-Qwen-7B": i % 17}},
        },
        lambda i: (f"Find {i}.{BOX}", rf"\sqrt{{{i}}}", "train-math-deepscaler", str(i % 17)),
    ),
    "big_math": (
        lambda i: {"problem": f"Find {i}.", "answer": f"{i}", "source": "orca_math", "domain": ["Mathematics -> Algebra"], "llama8b_solve_rate": 0.5},
        lambda i: (f"Find {i}.{BOX}", f"{i}", "big_math", "orca_math"),
    ),
    "aime": (
        lambda i: {"id": i, "problem": f"Find {i}.", "solution": "...", "answer": f"{i:03d}", "url": "https://", "year": "2024"},
        lambda i: (f"Find {i}.{BOX}", f"{i:03d}", "aime", "all"),
    ),
}


IN_OUR_SHAPE = {"dapo_17k", "deepscaler_40k", "polaris_53k", "skywork_or1_math"}
"""Of the recipes that name them: their files are to be written in the shape that needs no settings."""


def characters(messages: Any) -> int:
    return sum(len(message["content"]) for message in messages)


def made(config: DataConfig, tmp_path: Path) -> PreparedData:
    return prepare(config, 0, tmp_path / "data" / "set", 1000, characters)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def group(name: str, **files: str) -> DataConfig:
    """The group with these files, and none of those that it may name itself."""
    found = yaml.safe_load((conf_directory() / "data" / f"{name}.yaml").read_text())
    return DataConfig.model_validate(found | {"test_file": None} | files)


def test_there_is_a_set_for_each_group_of_files() -> None:
    assert set(choices("data")) == {*SETS, "chain_sum", "short_sums", "files", *IN_OUR_SHAPE}


# Mutation: another column or another extraction in any of the files under conf/data.
@pytest.mark.parametrize("name", SETS)
def test_rows_of_a_public_set_become_prompts(tmp_path: Path, name: str) -> None:
    row, expected = SETS[name]
    config = group(name, train_file=str(write(tmp_path / "train.parquet", [row(i) for i in range(20)])))
    data = made(config, tmp_path)
    prompts = [prompt for split in ("train", "validation", "test") for prompt in load_prompts(data.path(split))]
    found = {(prompt.messages[-1]["content"], prompt.ground_truth, prompt.data_source, prompt.difficulty) for prompt in prompts}
    assert found == {expected(i) for i in range(20)}


@pytest.mark.parametrize("name", SETS)
def test_a_recipe_takes_the_group_on_the_command_line(name: str) -> None:
    config = compose(["recipe=grpo_tiny", "~stages.sft", f"data={name}", "data.train_file=a.parquet"])
    assert config.data.model_copy(update={"test_file": None}) == group(name, train_file="a.parquet")


def test_a_test_set_may_have_another_shape(tmp_path: Path) -> None:
    overrides = ["data=gsm8k", "data@data.evaluation_rows=aime", "data.train_file=a.parquet", "data.test_file=b.parquet"]
    config = compose(["recipe=grpo_tiny", "~stages.sft", *overrides]).data
    files = {
        "train_file": str(write(tmp_path / "train.parquet", [SETS["gsm8k"][0](i) for i in range(20)])),
        "test_file": str(write(tmp_path / "test.parquet", [SETS["aime"][0](i) for i in range(4)])),
    }
    data = made(config.model_copy(update=files), tmp_path)
    # Without a file of its own, validation is taken out of train, in train's shape. Mutation: give it the test set's.
    assert {prompt.data_source for prompt in load_prompts(data.path("validation"))} == {"gsm8k"}
    assert {prompt.ground_truth for prompt in load_prompts(data.path("test"))} == {"000", "001", "002", "003"}


# Mutation: compare prompts with their templates on.
def test_a_test_prompt_in_train_is_found_under_another_template(tmp_path: Path) -> None:
    shape = RowsConfig(data_source="a", ability="math")
    row = {"prompt": "What is 2 + 2?", "reward_model": {"ground_truth": "4"}}
    config = DataConfig(
        **(shape.model_dump() | {"prompt_template": "Box it: {prompt}", "system_prompt": "Be brief."}),
        train_file=str(write(tmp_path / "train.parquet", [row, {**row, "prompt": "Another"}])),
        test_file=str(write(tmp_path / "test.parquet", [row])),
        evaluation_rows=shape,
    )
    with pytest.raises(DataError, match="1 of its 1 test prompts also stand in train"):
        made(config, tmp_path)


@pytest.mark.parametrize(
    ("name", "column", "value", "message"),
    [
        ("gsm8k", "answer", "no mark", "column answer: has no #### before an answer; its value is 'no mark'"),
        ("gsm8k", "answer", "####  ", "column answer: is empty"),
        ("math", "solution", "no box", r"column solution: has no \boxed{} with an answer"),
        ("math", "solution", None, "column solution: is null"),
        ("skywork_or1", "reward_model", {"ground_truth": "5", "style": "rule"}, "column reward_model.ground_truth: must be a list with an answer"),
        ("skywork_or1", "reward_model", {"ground_truth": "[]", "style": "rule"}, "column reward_model.ground_truth: must be a list with an answer"),
        ("aime", "problem", " ", "column problem: must be a list of messages"),
    ],
)
def test_bad_rows_are_named_with_the_columns_of_the_file(tmp_path: Path, name: str, column: str, value: Any, message: str) -> None:
    rows = [SETS[name][0](i) for i in range(20)]
    rows[7][column] = value
    with pytest.raises(DataError) as error:
        read_prompts(write(tmp_path / "train.parquet", rows), group(name, train_file="x"))
    assert f"row 7 (from 0), {message}" in str(error.value)


def test_a_column_that_is_not_there_is_named_with_its_setting(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", [SETS["aime"][0](1)])
    with pytest.raises(DataError, match=r"lacks the column question; it has: answer, id, .* \(data\.columns\.prompt names another\)"):
        read_prompts(path, group("gsm8k", train_file="x"))
    # The default one for difficulty may be missing, one that somebody asked for may not. Mutation: make it optional always.
    shape = RowsConfig.model_validate(
        {"columns": {"prompt": "problem", "ground_truth": "answer", "difficulty": "levle"}, "data_source": "a", "ability": "b"}
    )
    with pytest.raises(DataError, match="lacks the column levle"):
        read_prompts(path, shape)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_template": "Solve it."}, "prompt_template: 'Solve it.' has to contain {prompt} once"),
        ({"prompt_template": "{prompt}{prompt}"}, "has to contain {prompt} once"),
        ({"system_prompt": " "}, "system_prompt: is blank"),
        ({"evaluation_rows": {}}, "evaluation_rows: there is no validation_file and no test_file"),
        ({"chain_sum": {}, "train_file": None, "answer": "boxed", "data_source": "x"}, "answer, data_source would be ignored beside chain_sum"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        DataConfig.model_validate({"train_file": "a"} | settings)
    assert message in str(error.value)

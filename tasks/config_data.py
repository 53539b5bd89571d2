"""Where prompts and conversations come from, and how the rows of a file become them."""

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.config import Positive, Settings

PLACE = "{prompt}"
"""Stands in a template for the text of the prompt."""
AtMost = Annotated[float, Field(ge=0, le=1)]


class ChainSumConfig(Settings):
    """Chained sums and differences of single digits, from `reasoning-gym` (`chain_sum`)."""

    min_terms: Annotated[int, Field(ge=2)] = 2
    max_terms: Annotated[int, Field(ge=2)] = 8
    sft_rows: Positive = 20_000
    """Conversations for supervised fine-tuning."""
    train_rows: Positive = 4_000
    validation_rows: Positive = 200
    test_rows: Positive = 280
    """Rows are spread evenly over the numbers of terms, as far as there are different sums."""
    boxed_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of SFT answers that put the total into a box after the partial sums; the others just state it, as people do. Only a box is
    scored, so a model that was taught both ways has something to find out."""

    answer_line: bool = False
    """What is scored is a line `Answer: 5` in place of a box, and `boxed_fraction` the share of such lines."""

    @model_validator(mode="after")
    def _terms_in_order(self) -> Self:
        if self.max_terms < self.min_terms:
            raise ValueError(f"max_terms ({self.max_terms}) is below min_terms ({self.min_terms})")
        return self


class ColumnsConfig(Settings):
    """Which column of a file is what. `reward_model.ground_truth` is the field of an object, or of the JSON text of one."""

    prompt: str = "prompt"
    """Text, which becomes a message of the user, or a list of chat messages that ends with one."""
    ground_truth: str = "reward_model.ground_truth"
    """Text or a number."""
    data_source: str = "data_source"
    ability: str = "ability"
    difficulty: str = "extra_info.difficulty"
    """Class that evaluation reports by, text or a number. A file may lack the one that stands here by default: its rows are of the class `all`."""
    messages: str = "messages"
    """Of a conversation to be learnt: a list of chat messages that ends with the assistant's."""
    chosen: str = "chosen"
    """Of a preference pair: the better conversation, a list of chat messages."""
    rejected: str = "rejected"
    """The worse one, from the same prompt."""


class RowsConfig(Settings):
    """How the rows of a file become prompts."""

    columns: ColumnsConfig = ColumnsConfig()
    answer: Literal["whole", "after_hashes", "boxed", "first_of_list"] = "whole"
    r"""What of the ground truth's column is the answer: all of it; what follows the last `####`, without thousands separators (GSM8K); the content of
    the last \boxed{} (MATH); the first entry of a list or of the JSON text of one (Skywork-OR1)."""
    prompt_template: str = PLACE
    """The last user message of every prompt, with the text of the prompt in the place of `{prompt}`."""
    system_prompt: str | None = None
    """System message before every prompt, instead of its own if it has one."""
    data_source: str | None = None
    """Of every row, instead of a column."""
    ability: str | None = None
    """Of every row, instead of a column."""

    @model_validator(mode="after")
    def _template_has_a_place(self) -> Self:
        if self.prompt_template.count(PLACE) != 1:
            raise ValueError(f"prompt_template: {self.prompt_template!r} has to contain {PLACE} once, where the text of the prompt goes")
        for name in ("system_prompt", "data_source", "ability"):
            if (text := getattr(self, name)) is not None and not text.strip():
                raise ValueError(f"{name}: is blank; write something, or set null")
        return self

    def needed(self) -> dict[str, str]:
        """Columns that a file of prompts has to have, by what they are."""
        optional = {"difficulty"} if self.columns.difficulty == ColumnsConfig().difficulty else set()
        given = {name for name in ("data_source", "ability") if getattr(self, name) is not None}
        names = ("prompt", "data_source", "ability", "ground_truth", "difficulty")
        return {name: getattr(self.columns, name) for name in names if name not in optional | given}


class ChecksConfig(Settings):
    """What a prepared data set is asked, before anything is trained on it. Fractions are of a split's rows."""

    minimum_rows: Positive = 1
    """In every split."""
    duplicate_fraction: AtMost = 0.0
    """So many rows may have the content of another row of their split: without case, white space, and Unicode's compatible characters."""
    contaminated_fraction: AtMost = 0.0
    """So many rows of validation, test and `evaluation_files` may share a run of words with train or sft."""
    contamination_words: Positive = 13
    """Length of that run; a prompt with fewer words is looked for as a whole."""
    evaluation_files: list[str] = []
    """Prompts of further evaluation sets that must not stand in train or sft, read as test_file is."""
    unreadable_fraction: AtMost = 0.0
    """So many ground truths may fail to earn anything from the reward that will grade them, when they are given as the answer."""
    answers_checked: Positive = 1_000
    """Different ground truths of a split that are tried, spread evenly; all of them where there are fewer."""
    too_long_fraction: AtMost = 0.1
    """So many prompts may have been left out as longer than max_prompt_tokens."""
    languages: list[str] | None = None
    """Codes (en, zh, de, ...) that prompts may be written in, as far as a simple guess can tell; null: any."""
    foreign_fraction: AtMost = 0.05
    """So many prompts may be in another language than `languages` lists."""
    largest_class_fraction: AtMost = 1.0
    """So many rows of train may be of one difficulty; 1 asks nothing."""
    drift: AtMost = 0.1
    """How far the shares of data sources, difficulties, languages and prompt lengths may have moved since the last version of the set that was made
    with the same settings from other files: total variation distance beyond what chance gives."""


class DataConfig(RowsConfig):
    """Generated problems, or files of one's own: exactly one of `chain_sum` and `train_file`."""

    chain_sum: ChainSumConfig | None = None
    train_file: str | None = None
    """Prompts, as .parquet, .jsonl, .json, .csv, or a directory saved by `datasets.save_to_disk`. Relative paths start at the project's root."""
    validation_file: str | None = None
    test_file: str | None = None
    """Where null, `held_out_fraction` of the training prompts is taken out for it, chosen by content hash."""
    sft_file: str | None = None
    """Conversations, in the same formats; needed when a stage of kind sft uses files."""
    evaluation_rows: RowsConfig | None = None
    """How the rows of validation_file and test_file become prompts; null: as those of train_file do. A group fits here too:
    data@data.evaluation_rows=aime."""
    held_out_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.1
    quality: Literal["error", "warn", "off"] = "error"
    """What becomes of a data set that fails its checks: `error` stops the run, `warn` says so, `off` does not look."""
    checks: ChecksConfig = ChecksConfig()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.chain_sum is None and self.train_file is None:
            raise ValueError("no data; set train_file, or swap the group: data=chain_sum")
        if self.chain_sum is not None and self.train_file is not None:
            raise ValueError("chain_sum and train_file are both set; data=files takes chain_sum out")
        if self.chain_sum is not None and (unused := list(self._only_of_files())):
            raise ValueError(f"{', '.join(unused)} would be ignored beside chain_sum; set train_file too, or leave them out")
        files = [self.validation_file, self.test_file, *self.checks.evaluation_files]
        if self.evaluation_rows is not None and not any(files):
            raise ValueError("evaluation_rows: there is no validation_file and no test_file whose rows these could be; set one, or leave it out")
        return self

    def _only_of_files(self) -> Iterable[str]:
        here = ("validation_file", "test_file", "sft_file", "evaluation_rows", "columns", "answer", "data_source", "ability")
        return (name for name in here if getattr(self, name) != type(self).model_fields[name].default)

    def content(self) -> "DataConfig":
        """The settings that the rows depend on: all but what is asked of them."""
        plain = type(self).model_fields
        return self.model_copy(update={name: plain[name].default for name in ("quality", "checks")})

    def shape_of_evaluations(self) -> RowsConfig:
        """How the rows of files that are evaluated on become prompts."""
        return self if self.evaluation_rows is None else self.evaluation_rows

    def rows_of(self, split: str) -> RowsConfig:
        """How rows became the prompts of a split: without a file of its own it was taken out of train."""
        has_file = (split == "test" and self.test_file is not None) or (split == "validation" and self.validation_file is not None)
        return self.shape_of_evaluations() if has_file else self

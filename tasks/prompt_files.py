"""The prompts that stages read, and those that they give to later ones, as files."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from engine.atomic import atomic_file
from engine.config import RLStageConfig
from engine.prompts import Prompt
from tasks import data
from tasks.data import PreparedData
from tasks.data_error import DataError
from tasks.stage_config import GIVEN, AskingStageConfig, DropEasyStageConfig

PROMPTS = GIVEN["prompts"]
"""The prompts that a stage gives to later ones, in its output: rows of the data set, as they were."""


def prompts_file(stage: RLStageConfig | AskingStageConfig | DropEasyStageConfig, outputs: Mapping[str, Path], ready: PreparedData) -> Path:
    """The prompts that a stage reads: those of the stage that it refers to, by the outputs of all stages before, or those of the train split."""
    return ready.unchanged("train") if stage.prompts is None else outputs[stage.prompts] / PROMPTS


def short_enough(name: str, stage: RLStageConfig | AskingStageConfig, path: Path, tokenizer: Any) -> tuple[list[Prompt], str | None]:
    """The file's prompts within the stage's own cap, and a sentence about those that are left out; the data were cut at the largest of all stages.

    Raises:
        DataError: no prompt is left.
    """
    from engine.tokenizer import render_prompt  # torch, which filtering needs not

    prompts = data.load_prompts(path)
    kept = [prompt for prompt in prompts if len(render_prompt(tokenizer, prompt.messages)) <= stage.max_prompt_tokens]
    key = f"stages.{name}.max_prompt_tokens={stage.max_prompt_tokens}"
    if not kept:
        raise DataError(path, [f"no prompt is left for stage {name}: all {len(prompts)} have more tokens than {key}; raise it"])
    if len(kept) == len(prompts):
        return prompts, None
    return kept, f"stage {name}: {len(prompts) - len(kept)} prompts have more tokens than {key} and are left out"


def write_kept(source: Path, prompts: Sequence[Prompt], kept: Collection[str], target: Path, none: str) -> None:
    """The rows of the file `source`, from which `prompts` are, whose ids are kept, into the file `target`.

    Raises:
        DataError: none is left, with the text `none`.
    """
    rows = [prompt.index for prompt in prompts if prompt.id in kept]
    if not rows:
        raise DataError(source, [none])
    with atomic_file(target) as file:
        parquet.write_table(parquet.read_table(source).take(rows), file)

"""The parts of a recipe, one function each: plain calls that a flow or any other runner puts in order.

`create_model`, `prepare_data`, then inside `engine`: `evaluate` the first weights, and for each stage `run_stage`, and `evaluate` where it trains.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from transformers import AutoTokenizer

from engine import model
from engine.tokenizer import render_prompt
from engine.trainer import evaluation
from engine.trainer.session import Session
from tasks import data, kinds, workspace
from tasks.accuracy import Accuracy, accuracy, record_gain
from tasks.config import RecipeConfig
from tasks.context import RunContext
from tasks.data import PreparedData
from tasks.progress import (
    BASE,
    CREATE_MODEL,
    PREPARE_DATA,
    START_ENGINE,
    Listener,
    Notice,
    devices,
    evaluation_phase,
    told,
)
from tasks.stage_config import kind_of

EVALUATION = "evaluation"
"""Who reads the test split, as the tracker knows it."""


def create_model(context: RunContext) -> None:
    """The weights that the recipe starts from.

    Raises:
        ValueError: the model cannot be made; names the key.
    """
    config = context.config
    with told(context.listener, CREATE_MODEL):
        context.model_directory = first_weights(config)
        context.record.lineage.base_model_digest = model.directory_digest(context.model_directory)
        context.save()


def prepare_data(context: RunContext) -> None:
    """Splits, checked and written as parquet; the test prompts in memory.

    Raises:
        DataError: a file cannot be used; names file, row and column.
    """
    config = context.config
    with told(context.listener, PREPARE_DATA) as result:
        context.data = prepared(config, context.model_directory)
        context.test = data.load_prompts(context.data.path("test"))
        context.record.lineage.dataset_digests = context.data.digests
        context.save()
        for split, rows in context.data.rows.items():
            used_by = [EVALUATION] if split == "test" else _stages_that_read(config, split)
            training = split in ("sft", "train")
            kind = "training" if training else split
            source = str(context.data.path(split))
            context.tracker.log_dataset(f"{config.name}/{split}", context.data.digests[split], rows, kind, source, used_by)
        for split, counts in context.data.dropped.items():
            if counts.get("too_long"):
                limit = config.max_evaluation_prompt_tokens()
                text = f"{split}: {counts['too_long']} prompts have more than {limit} tokens (max_prompt_tokens) and are left out"
                context.listener(Notice(text=text))
        result.append(f"{context.data.rows['train']} prompts")
        result.append(f"{context.data.rows['test']} to test")


@contextmanager
def engine(context: RunContext) -> Iterator[None]:
    """Ray and the hybrid actors, there for all stages inside the block.

    Raises:
        ResourceError: Ray lacks devices; names the resource.
        WorkerError: a worker failed; names it.
    """
    with ExitStack() as stack:
        with told(context.listener, START_ENGINE) as result:
            opening = Session.open(context.config.engine(), context.model_directory, context.directory)
            context.session = stack.enter_context(opening)
            result.append(devices(context.config))
        yield


def evaluate(context: RunContext, label: str) -> None:
    """Accuracy of the policy on the test prompts: of `base`, or after the stage with this name, whose gain it then is."""
    config = context.config
    before = None if label == BASE else context.evaluation
    with told(context.listener, evaluation_phase(label)) as result:
        found = evaluation.evaluate(context.session, label, config.evaluation, config.evaluation_reward, context.test, config.seed, context.emit)
        context.accuracy = context.tracker.log_evaluation(found, stage=None if before is None else label)
        if before is not None:
            record_gain(context.record.stage(label), before, found, config.evaluation, config.seed)
        context.evaluation = found
        context.save()
        result.append(described(context.accuracy))


def run_stage(context: RunContext, name: str) -> None:
    """One stage of the recipe, from the weights that the engine holds, with what it leaves."""
    entry, before = context.record.stage(name), context.accuracy
    if kind_of(context.config.stages[name]).trains:
        entry.accuracy_before, entry.interval_before = before.average.mean, (before.average.low, before.average.high)
        entry.greedy_before = before.greedy.mean
        context.save()
    directory = context.directory / "stages" / name
    directory.mkdir(parents=True, exist_ok=True)
    context.outputs[name] = directory
    kinds.run(context, name, directory)
    entry.output, entry.status = str(directory), "finished"
    context.save()


def evaluate_model(config: RecipeConfig, label: str, directory_for_logs: Path, listener: Listener) -> Accuracy:
    """Accuracy of a recipe's first weights on its test prompts, without a run: nothing is recorded.

    Raises:
        ValueError, DataError, ResourceError, WorkerError: as in a run.
    """
    with told(listener, CREATE_MODEL):
        directory = first_weights(config)
    with told(listener, PREPARE_DATA) as result:
        ready = prepared(config, directory)
        prompts = data.load_prompts(ready.path("test"))
        result.append(f"{len(prompts)} to test")
    with ExitStack() as stack:
        with told(listener, START_ENGINE) as result:
            # Nothing is trained: the roles that training needs are left out.
            alone = config.engine().model_copy(update={"reference": False, "critic": False, "annotators": {}})
            session = stack.enter_context(Session.open(alone, directory, directory_for_logs))
            result.append(devices(config))
        with told(listener, evaluation_phase(label)) as result:
            found = evaluation.evaluate(session, label, config.evaluation, config.evaluation_reward, prompts, config.seed, listener)
            summary = accuracy(found, config.evaluation, config.seed)
            result.append(described(summary))
    return summary


def first_weights(config: RecipeConfig) -> Path:
    """Directory of the model that the recipe starts from, made once and kept under `.work/models`; a local directory is taken as it is."""
    if config.model.path is not None and (local := workspace.root() / config.model.path).is_dir():
        return local
    key = model.model_digest_key(config.model, config.seed)
    return model.create(config.model, config.seed, workspace.models_directory() / key)


def prepared(config: RecipeConfig, model_directory: Path) -> PreparedData:
    """The recipe's splits, with prompt lengths counted by the model's own tokenizer and template."""
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    # The tokenizer's content, not its directory: a model trained from this one counts in the same way.
    content = [tokenizer.backend_tokenizer.to_str(), tokenizer.get_chat_template()]
    return data.prepare(
        config.data,
        config.seed,
        workspace.data_directory(config.name),
        config.max_evaluation_prompt_tokens(),
        lambda messages: len(render_prompt(tokenizer, messages)),
        counted_by=hashlib.sha256(json.dumps(content).encode()).hexdigest(),
    )


def described(summary: Accuracy) -> str:
    """Average accuracy and its interval, short enough for a line."""
    average = summary.average
    return f"avg@{summary.samples_per_prompt} {100 * average.mean:.1f} % [{100 * average.low:.1f}, {100 * average.high:.1f}]"


def _stages_that_read(config: RecipeConfig, split: str) -> list[str]:
    return [name for name, stage in config.stages.items() if kind_of(stage).reads == split and getattr(stage, "prompts", None) is None]

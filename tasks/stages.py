"""The parts of a recipe, one function each: plain calls that a flow or any other runner puts in order.

`create_model`, `prepare_data`, `evaluate` the first weights, and for each stage `run_stage`, and `evaluate` where it trains. What lies ready from an
earlier run, made from the same, is taken as it is (`tasks/outputs.py`); the engine starts when something first needs it.
"""

import dataclasses
import hashlib
import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pyarrow.parquet as parquet
from transformers import AutoTokenizer

from engine import model
from engine.tokenizer import render_prompt
from engine.trainer import evaluation
from engine.trainer.evaluation import Evaluation
from engine.trainer.session import Session
from tasks import data, fingerprint, kinds, preflight, validate, workspace
from tasks.accuracy import Accuracy, accuracy, described, record_gain
from tasks.config import RecipeConfig
from tasks.context import RunContext
from tasks.data import PreparedData
from tasks.dvc_graph import PLOTS, SCORED, STEPS, evaluation_unit
from tasks.engines import Weights
from tasks.journal import DatasetUsed
from tasks.lineage import hold_file, hold_inputs, hold_modules
from tasks.outputs import MODEL, OUTPUT, DamagedOutputError, Output, Place, file_entry
from tasks.problems import ConfigurationError
from tasks.progress import (
    BASE,
    CREATE_MODEL,
    PREPARE_DATA,
    START_ENGINE,
    VALIDATE_DATA,
    Listener,
    Notice,
    devices,
    evaluation_phase,
    told,
)
from tasks.publishing import write_steps
from tasks.stage_config import GIVEN, REFERENCES, kind_of, references

EVALUATION = "evaluation"
"""Who reads the test split, as the tracker knows it."""


def create_model(context: RunContext) -> None:
    """The weights that the recipe starts from.

    Raises:
        ValueError: the model cannot be made; names the key.
    """
    config = context.config
    with told(context.listener, CREATE_MODEL):
        context.weights = Weights.of(first_weights(config))
        context.record.lineage.base_model_digest = context.weights.digest
        context.save()
        context.tracker.log_base_model(context.weights.directory, context.weights.digest)


def prepare_data(context: RunContext) -> None:
    """Splits, checked and written as parquet; the test prompts in memory.

    Raises:
        DataError: a file cannot be used; names file, row and column.
        ChangedInputError: a file is not what it was when the run began.
    """
    config = context.config
    with told(context.listener, PREPARE_DATA) as result:
        context.data = prepared(config, context.weights.directory)
        hold_inputs(context.record.lineage, context.data.inputs)
        context.record.lineage.dataset_digests = context.data.digests
        context.save()
        context.test = data.load_prompts(context.data.unchanged("test"))
        context.publication.data()
        for split, rows in context.data.rows.items():
            used_by = [EVALUATION] if split == "test" else _stages_that_read(config, split)
            file = context.data.path(split)
            context.tracker.log_dataset(
                DatasetUsed(
                    name=f"{config.name}/{split}",
                    digest=context.data.digests[split],
                    rows=rows,
                    context="training" if split in ("sft", "train") else split,
                    source=str(file),
                    used_by=used_by,
                    md5=_md5(file),
                    columns={column.name: str(column.type) for column in parquet.read_schema(file)},
                )
            )
        for split, counts in context.data.dropped.items():
            if counts.get("too_long"):
                limit = config.max_evaluation_prompt_tokens()
                text = f"{split}: {counts['too_long']} prompts have more than {limit} tokens (max_prompt_tokens) and are left out"
                context.listener(Notice(text=text))
        result.append(f"{context.data.rows['train']} prompts")
        result.append(f"{context.data.rows['test']} to test")


def validate_data(context: RunContext) -> None:
    """The verdict on the prepared splits, with its pages among the run's artifacts.

    Raises:
        DataError: the data are not fit, and `data.quality` is `error`; names split, rows and settings.
    """
    with told(context.listener, VALIDATE_DATA) as result:
        for key, file in context.record.lineage.inputs.items():
            if key.startswith("data.checks"):
                hold_file(key, workspace.root() / file.path, file.sha256)
        found = validate.validate(context.config, context.data)
        for path in found.files():
            context.tracker.log_file(path, str(Path("data_quality") / path.parent.relative_to(found.directory)))
        if context.config.data.quality == "error":
            validate.refuse(found, context.data.directory)
        context.publication.validation(found)
        for problem in found.problems:
            context.listener(Notice(text=problem))
        failed = f", {len(found.problems)} failed" if found.problems else ""
        result.append(f"{found.checks} checks{failed}{' (as before)' if found.reused else ''}")


def start_engine(context: RunContext) -> None:
    """Starts the engine where the evaluation of the first weights does not lie ready; else it starts when something first needs it.

    Raises:
        ResourceError: Ray lacks devices; names the resource.
        WorkerError: a worker failed; names it.
    """
    if _kept(context, _evaluation(context), evaluation_unit(BASE)) is None:
        _ = context.session


def evaluate(context: RunContext, label: str) -> Place:
    """Accuracy of the weights as they are now on the test prompts: of `base`, or after the stage with this name, whose gain it then is.

    Returns where scores and samples lie.
    """
    config, before, place = context.config, context.evaluation, _evaluation(context)
    kept = _kept(context, place, evaluation_unit(label))
    if kept is None:
        with place.making(keep=False) as directory:
            # The engine's start is a phase of its own.
            session = context.session
            with told(context.listener, evaluation_phase(label)) as result:
                found = evaluation.evaluate(session, label, config.evaluation, config.evaluation_reward, context.test, config.seed, context.emit)
                (directory / SCORED).write_text(json.dumps(dataclasses.asdict(found)))
                place.complete(context.run)
                result.append(_evaluated(context, label, before, found))
        context.publication.evaluation(label, place.directory, context.accuracy)
        return place
    with told(context.listener, evaluation_phase(label)) as result:
        found = evaluation.Evaluation(**{**json.loads((place.directory / SCORED).read_text()), "label": label})
        result += [_evaluated(context, label, before, found), f"as in {kept.run}"]
    context.publication.evaluation(label, place.directory, context.accuracy)
    return place


def _evaluated(context: RunContext, label: str, before: Evaluation | None, found: Evaluation) -> str:
    """Puts an evaluation where it belongs. Returns its accuracy, in words."""
    context.accuracy = context.tracker.log_evaluation(found, stage=None if label == BASE else label)
    if before is not None:
        record_gain(context.record.stage(label), before, found, context.config.evaluation, context.config.seed)
    context.evaluation = found
    context.save()
    return described(context.accuracy)


def run_stage(context: RunContext, name: str, *, only_kept: bool = False) -> Place:
    """One stage of the recipe: as it lies ready from a run that made it from the same, or else made now. Returns where what it leaves lies.

    With `only_kept` it has to lie ready: ValueError where it does not.
    """
    kind = kind_of(context.config.stages[name])
    place = Place(context.config.name, name, fingerprint.of_stage(context.config, name, context.weights.digest, _inputs(context, name)))
    context.outputs[name] = place.directory
    kept = _kept(context, place, name)
    if kept is not None:
        with told(context.listener, name) as result:
            result.append(_reuse(context, name, kept))
        context.publication.stage(name, place.directory)
        return place
    if only_kept:
        raise ValueError(f"stage {name} of recipe {context.config.name} has no output yet that was made from these settings; run it first")
    _begin(context, name)
    context.steps = {}
    there = kind.resumes and not context.fresh and not (place.directory / OUTPUT).exists()
    with place.making(keep=there) as directory:
        kinds.run(context, name, directory)
        entry = context.record.stage(name)
        entry.output, entry.status = str(directory), "finished"
        context.save()
        if kind.trains:
            _keep_curves(context, name, directory)
        place.complete(context.run, entry, context.last_metrics() | entry.results)
    context.publication.stage(name, place.directory)
    return place


def _keep_curves(context: RunContext, name: str, directory: Path) -> None:
    """The stage's metrics by step, and the pictures of them that the tracker has drawn."""
    write_steps(directory / STEPS, context.steps)
    (directory / PLOTS).mkdir()
    for picture in sorted((context.directory / "plots" / name).glob("*.png")):
        shutil.copy2(picture, directory / PLOTS)


def _begin(context: RunContext, name: str) -> None:
    """What is known of a stage that trains before it does."""
    if context.evaluation is not None and kind_of(context.config.stages[name]).trains:
        entry, before = context.record.stage(name), context.accuracy
        entry.accuracy_before, entry.interval_before = before.average.mean, (before.average.low, before.average.high)
        entry.greedy_before = before.greedy.mean
        context.save()


def _evaluation(context: RunContext) -> Place:
    """Where the evaluation of the weights as they are now lies."""
    config = context.config
    return Place(config.name, EVALUATION, fingerprint.of_evaluation(config, context.weights.digest, context.data.digests["test"]))


def _kept(context: RunContext, place: Place, unit: str) -> Output | None:
    """What lies ready, here or published, with its run among the parents; None where it is to be made."""
    hold_modules(context.record.lineage, place.made_from["own_modules"])
    if context.fresh:
        return None
    context.publication.lay_out(unit, place)
    try:
        found = place.find()
    except DamagedOutputError as error:
        context.listener(Notice(text=f"{error}; it is made anew"))
        return None
    if found is not None:
        context.record.lineage.parents = {**context.record.lineage.parents, unit: found.run}
        context.save()
    return found


def _reuse(context: RunContext, name: str, kept: Output) -> str:
    """Takes over what another run made of the stage. Returns that in words."""
    assert kept.record is not None
    directory, trains = context.outputs[name], kind_of(context.config.stages[name]).trains
    model_directory = directory / MODEL
    taken = {"output": str(directory), "model": str(model_directory) if trains else None, "reused_from": kept.run}
    context.record.stages = [kept.record.model_copy(update=taken) if entry.name == name else entry for entry in context.record.stages]
    _begin(context, name)
    context.tracker.log_reused(name, kept.run, kept.record.steps)
    if trains:
        context.weights = Weights.of(model_directory)
        context.record.final_model = str(model_directory)
    context.save()
    return f"as in {kept.run}"


def _inputs(context: RunContext, name: str) -> dict[str, str]:
    """Digests of what a stage reads: a split of the data, and files of the stages that it refers to."""
    stage = context.config.stages[name]
    split = fingerprint.reads_split(stage)
    found = {} if split is None else {split: context.data.digests[split]}
    for setting, other in references(stage):
        file = GIVEN[REFERENCES[setting]]
        found[f"{setting}/{other}"] = str(file_entry(context.outputs[other] / file)["sha256"])
    return found


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
    """Directory of the model that the recipe starts from, made once and kept under `.work/models`; a local directory is taken as it is.

    Raises:
        ConfigurationError: what the recipe generates does not fit into the model's context.
    """
    if config.model.path is not None and (local := workspace.root() / config.model.path).is_dir():
        directory = local
    else:
        key = model.model_digest_key(config.model, config.seed)
        directory = model.create(config.model, config.seed, workspace.models_directory() / key)
    if problems := list(preflight.beyond_context(config, directory)):
        raise ConfigurationError(problems)
    return directory


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


def _md5(path: Path) -> str:
    """Of a file: not to trust it by, but to find it by where DVC names it so."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _stages_that_read(config: RecipeConfig, split: str) -> list[str]:
    return [name for name, stage in config.stages.items() if fingerprint.reads_split(stage) == split]

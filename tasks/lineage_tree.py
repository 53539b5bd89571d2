"""The lineage of a run or of a model, from the hashes of data and first weights over each stage's output to the metric."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text
from rich.tree import Tree

from engine.digest import listed_digest
from tasks import outputs, record, workspace
from tasks.lineage import PATCH
from tasks.outputs import MODEL, DamagedOutputError, Output
from tasks.record import RunRecord, StageRecord
from tasks.show import average, gain, percent

SHORT = 12
"""Digits of a hash on the terminal."""


@dataclass(frozen=True, slots=True)
class Link:
    """One stage between data and metric."""

    stage: StageRecord
    made: Output | None
    """What its output says of itself; None where that is not there, or not as it was written."""
    trouble: str | None
    """Why the output is not the one that the record is about; None where it is."""

    @property
    def model_digest(self) -> str | None:
        """Of the weights that it has left, as `engine.digest.directory_digest` has it; None of a stage that does not train."""
        files = {} if self.made is None else self.made.files
        model = {name.removeprefix(f"{MODEL}/"): str(entry["sha256"]) for name, entry in files.items() if name.startswith(f"{MODEL}/")}
        # A manifest has its files in the order in which a directory's digest takes them.
        return listed_digest(model) if model else None


def find(name: str) -> tuple[RunRecord, list[Link]]:
    """The run with this id (or `latest`), or the one that made this model's directory, with its stages up to there. Outputs are hashed.

    Raises:
        ValueError: there is no such run, or the directory is no stage's model.
    """
    directory = Path(name)
    if not directory.is_dir():
        found = record.load(name)
        return found, chain(found)
    output = directory.resolve().parent
    try:
        made = outputs.read(output)
    except DamagedOutputError as error:
        raise ValueError(f"{name} cannot be told where it is from: {error}; make it again with `almanac run`") from error
    if made is None or made.record is None or directory.resolve().name != MODEL:
        raise ValueError(
            f"{name} is no model that a stage has left ({output / outputs.OUTPUT} would say which); give the directory that `almanac show RUN` names"
        )
    found = record.load(made.run)
    links = chain(found)
    names = [link.stage.name for link in links]
    return found, links[: names.index(made.record.name) + 1]


def chain(run: RunRecord) -> list[Link]:
    """The stages of a run that have left something, in order, each output hashed."""
    return [_link(run, stage) for stage in run.stages if stage.output is not None]


def _link(run: RunRecord, stage: StageRecord) -> Link:
    directory, maker = Path(stage.output or ""), stage.reused_from or run.run
    try:
        made = outputs.read(directory)
    except DamagedOutputError as error:
        return Link(stage, None, str(error))
    if made is None:
        return Link(stage, None, f"{directory} is gone, or is being made again")
    return Link(stage, made, None if made.run == maker else f"made again since, by {made.run}")


def summary(run: RunRecord, links: list[Link]) -> dict[str, Any]:
    """As JSON values: `almanac lineage --json`."""
    return {
        "run": run.run,
        "status": run.status,
        "mlflow": run.mlflow and run.mlflow.model_dump(mode="json"),
        "lineage": run.lineage.model_dump(mode="json"),
        "stages": [_summary(run, link) for link in links],
    }


def _summary(run: RunRecord, link: Link) -> dict[str, Any]:
    stage, made = link.stage, link.made
    measured = ("samples_per_prompt", "accuracy_before", "accuracy_after", "interval", "greedy_after", "gain", "gain_interval")
    return {
        "stage": stage.name,
        "kind": stage.kind,
        "run": stage.reused_from or run.run,
        "output": stage.output,
        "trouble": link.trouble,
        "fingerprint": made and made.fingerprint,
        "made_from": made and made.made_from,
        "model": stage.model,
        "model_digest": link.model_digest,
        "test_digest": run.lineage.dataset_digests.get("test") if stage.accuracy_after is not None else None,
        **{name: getattr(stage, name) for name in measured},
        "results": stage.results,
    }


def tree(run: RunRecord, links: list[Link]) -> Tree:
    """For the terminal: what the run was made from, then each stage below the weights that it began with."""
    lineage = run.lineage
    root = Tree(Text.assemble((run.run, "bold"), f"  {run.status}"))
    code = _add(root, "code", f"commit {_short(lineage.commit)}")
    if lineage.patch_digest is not None:
        _add(code, "not committed", f"{_short(lineage.patch_digest)}  {workspace.run_directory(run.run) / PATCH}")
    for name in lineage.patch_left_out:
        _add(code, "not committed, and not kept", name)
    for module, digest in lineage.own_modules.items():
        _add(root, f"module {module}", _short(digest))
    _add(root, "configuration", _short(lineage.configuration_digest))
    _add(root, "packages", f"lock file {_short(lineage.lock_digest)}, {len(lineage.packages)} installed")
    _add(root, "machine", ", ".join(str(lineage.hardware[key]) for key in ("cpu", "device", "dtype") if key in lineage.hardware))
    _add(root, "seed", str(lineage.seed))
    if run.mlflow is not None:
        _add(root, "MLflow", f"run {run.mlflow.run_id}")
    data = _add(root, "data", "")
    for key, file in lineage.inputs.items():
        _add(data, f"{key} {file.path}", _short(file.sha256))
    for split, digest in lineage.dataset_digests.items():
        _add(data, f"split {split}", _short(digest))
    below = _add(root, "base model", _short(lineage.base_model_digest))
    before = next((stage for stage in run.stages if stage.accuracy_before is not None), None)
    if before is not None:
        _metric(below, run, percent(before.accuracy_before, before.interval_before))
    for link in links:
        below = _stage(below, run, link)
    return root


def _stage(below: Tree, run: RunRecord, link: Link) -> Tree:
    """A stage under the weights that it began with. Returns the weights that the next one begins with."""
    stage, made = link.stage, link.made
    node = _add(below, f"{stage.kind} {stage.name}", f"output {_short(made.fingerprint if made else None)}")
    if stage.reused_from is not None:
        _add(node, "made by", stage.reused_from)
    if link.trouble is not None:
        node.add(Text(link.trouble, "red"))
    for what, digest in (made.made_from.get("inputs", {}) if made is not None else {}).items():
        _add(node, f"from {what}", _short(digest))
    if stage.model is None:
        return below
    model = _add(node, "model", f"{_short(link.model_digest)}  {stage.model}")
    if stage.accuracy_after is not None:
        _metric(model, run, f"{percent(stage.accuracy_after, stage.interval)}, gain {gain(stage)}")
    return model


def _metric(below: Tree, run: RunRecord, numbers: str) -> None:
    below.add(Text.assemble((average(run), "green"), f" {numbers} %, on split test {_short(run.lineage.dataset_digests.get('test'))}"))


def _add(below: Tree, name: str, text: str) -> Tree:
    return below.add(Text.assemble((name, "bold"), "  ", text))


def _short(digest: str | None) -> str:
    return "unknown" if digest is None else digest[:SHORT]

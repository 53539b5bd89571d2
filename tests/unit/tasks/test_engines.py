"""When the engine of a run starts, and from which weights; with a session that only notes where it was opened."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tasks import engines
from tasks.compose import compose
from tasks.engines import Engine, Weights
from tasks.lineage import ChangedInputError
from tasks.progress import START_ENGINE, PhaseStarted

opened: list[Path] = []
closed: list[Path] = []
told: list[Any] = []


class Session:
    """Stands for the engine's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    @contextmanager
    def open(cls, config: object, model_directory: Path, directory: Path) -> Iterator["Session"]:
        opened.append(model_directory)
        yield cls(model_directory)
        closed.append(model_directory)

    def export(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "weights").write_text(directory.name)


@pytest.fixture(autouse=True)
def _noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "Session", Session)
    for notes in (opened, closed, told):
        notes.clear()


def engine(tmp_path: Path, *overrides: str) -> Engine:
    return Engine(compose(["recipe=grpo_tiny", *overrides]), tmp_path, told.append)


@pytest.fixture
def base(tmp_path: Path) -> Weights:
    return weights(tmp_path / "base")


def weights(directory: Path) -> Weights:
    directory.mkdir()
    (directory / "weights").write_text(directory.name)
    return Weights.of(directory)


def test_it_starts_when_it_is_needed_and_once_for_the_same_weights(tmp_path: Path, base: Weights) -> None:
    made = engine(tmp_path)
    made.close()
    assert (opened, told) == ([], [])
    assert made.session(base) is made.session(Weights(Path("elsewhere"), base.digest))
    assert opened == [base.directory]
    assert told[0] == PhaseStarted(phase=START_ENGINE)
    made.close()
    assert closed == [base.directory]


def test_other_weights_than_it_holds_start_it_anew(tmp_path: Path, base: Weights) -> None:
    # As where a stage is made anew and the next one lies ready. Mutation: a session that is open is taken, whatever it holds.
    made = engine(tmp_path)
    other = weights(tmp_path / "other")
    made.session(base)
    made.session(other)
    assert (opened, closed) == ([base.directory, other.directory], [base.directory])
    # What is being trained is not what it began with. Mutation: leave `trains` out.
    made.trains()
    made.session(other)
    assert opened == [base.directory, other.directory, other.directory]


def test_weights_that_were_changed_are_refused(tmp_path: Path, base: Weights) -> None:
    # Mutation: `session` opens the directory unhashed.
    (base.directory / "weights").write_text("others")
    with pytest.raises(ChangedInputError, match="base is not what the run's lineage says"):
        engine(tmp_path).session(base)
    assert opened == []


@pytest.mark.parametrize(("overrides", "starts"), [([], 1), (["training=lora"], 2)])
def test_after_an_export_it_holds_what_was_written_unless_that_was_merged(tmp_path: Path, base: Weights, overrides: list[str], starts: int) -> None:
    # Mutation: the session with its adapter goes on, where a run that was broken off would begin with a fresh one on the merged weights.
    made = engine(tmp_path, *overrides)
    made.session(base)
    made.trains()
    written = made.export(tmp_path / "model")
    assert written == Weights.of(tmp_path / "model")
    made.session(written)
    assert opened == [base.directory, tmp_path / "model"][:starts]

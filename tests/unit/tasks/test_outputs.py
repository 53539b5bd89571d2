"""Outputs: complete or not there, and damage is named."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.outputs import OUTPUT, DamagedOutputError, Place
from tasks.record import StageRecord
from tasks.run_lock import RunInProgressError

RECORD = StageRecord(name="rl", kind="rl", steps_planned=2, steps=2, status="finished")


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))


def place(**changes: object) -> Place:
    return Place("tiny", "rl", {"seed": 0, "settings": {"steps": 2}} | changes)


def made(keep: bool = False) -> Path:
    with place().making(keep=keep) as directory:
        (directory / "model").mkdir(exist_ok=True)
        (directory / "model" / "weights").write_bytes(b"0123456789")
        (directory / "scores.jsonl").write_text("{}\n")
        place().complete("tiny-1", RECORD, {"reward/mean": 0.5})
    return directory


def broken_off(file: str, *, keep: bool) -> Path:
    """A process writes a file and is killed."""
    directories = []

    def body() -> None:
        with place().making(keep=keep) as directory:
            directories.append(directory)
            (directory / file).write_text("1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        body()
    return directories[0]


def test_what_was_completed_is_found_with_what_was_said_of_it() -> None:
    assert place().find() is None
    directory = made()
    found = place().find()
    assert found is not None
    assert (found.run, found.record, found.metrics) == ("tiny-1", RECORD, {"reward/mean": 0.5})
    assert found.made_from == {"seed": 0, "settings": {"steps": 2}}
    assert set(found.files) == {"model/weights", "scores.jsonl"}
    assert found.files["scores.jsonl"]["bytes"] == 3
    # Mutation: a fingerprint of the unit's name alone.
    assert place(seed=1).find() is None
    assert place(seed=1).directory != directory


def test_what_was_broken_off_is_not_found_and_gone_from_only_where_that_is_meant() -> None:
    broken_off("part", keep=False)
    assert place().find() is None
    with place().making(keep=True) as directory:
        assert (directory / "part").exists()
    # Mutation: leave what is there; an RL stage's score log would have its steps twice.
    with place().making(keep=False) as directory:
        assert not (directory / "part").exists()


def test_making_again_takes_the_completion_away_first() -> None:
    made()
    directory = broken_off("scores.jsonl", keep=True)
    # Mutation: output.json stays; the half-made output would be called damaged, or with a file of equal bytes be taken.
    assert place().find() is None
    assert not (directory / OUTPUT).exists()


def test_an_output_under_anothers_name_is_not_taken() -> None:
    # Mutation: compare nothing with what is asked for.
    shutil.copytree(made(), place(seed=1).directory)
    with pytest.raises(DamagedOutputError, match=r"output\.json is of another output, with fingerprint"):
        place(seed=1).find()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda directory: (directory / "scores.jsonl").unlink(), r"scores\.jsonl is gone"),
        (lambda directory: (directory / "model" / "weights").write_bytes(b"012345678"), "model/weights is not as it was written: 10 bytes"),
        # Of the same size. Mutation: compare sizes only.
        (lambda directory: (directory / "model" / "weights").write_bytes(b"0123456780"), "model/weights is not as it was written: 10 bytes"),
        (lambda directory: (directory / OUTPUT).write_text("{"), r"output\.json cannot be read"),
        (
            lambda directory: (directory / OUTPUT).write_text((directory / OUTPUT).read_text().replace(place().fingerprint, "0" * 64)),
            "does not say what the output was made from: .* fingerprint than 0000",
        ),
    ],
)
def test_damage_is_named(spoil: object, said: str) -> None:
    directory = made()
    spoil(directory)  # type: ignore[operator]
    with pytest.raises(DamagedOutputError, match=said):
        place().find()
    made()
    assert place().find() is not None


def test_two_processes_do_not_make_the_same_output() -> None:
    with place().making(keep=False), pytest.raises(RunInProgressError, match="another process makes"), place().making(keep=False):
        pass
    made()


@given(st.dictionaries(st.text(max_size=3), st.integers(), max_size=3))
def test_the_order_of_what_it_is_made_from_does_not_count(parts: dict[str, int]) -> None:
    assert Place("tiny", "rl", parts).fingerprint == Place("tiny", "rl", dict(reversed(parts.items()))).fingerprint

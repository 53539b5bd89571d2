"""Checkpoints: what others load, bit for bit, and nothing half-written."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from probe import weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import export
from engine.export import save_checkpoint
from engine.trainer.session import Session

MESSAGES = [{"role": "user", "content": "1+1"}]


def test_transformers_loads_what_was_exported(session: Session, tmp_path: Path) -> None:
    directory = session.export(tmp_path / "model")
    # Mutation: write a tied head too, or leave the final norm out.
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype is torch.float32
    loaded = dict(model.named_parameters())
    expected = weights(session)
    assert set(loaded) == set(expected)
    # Mutation: export in the rollout's type.
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == session.tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    # Nothing beside it.
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_export_replaces_the_last_one(session: Session, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "of_the_last_one").touch()
    session.export(directory)
    assert not (directory / "of_the_last_one").exists()
    assert json.loads((directory / "config.json").read_text())["model_type"] == "qwen3"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


class Saved:
    """Stands for a configuration or a tokenizer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def save_pretrained(self, directory: Path) -> None:
        (directory / self.name).touch()


def save(directory: Path, value: float, writes: bool = True) -> None:
    weights = ((name, torch.full((2, 2), value)) for name in ("one", "two"))
    save_checkpoint(weights, Saved("config.json"), Saved("tokenizer.json"), directory, writes=writes)


def full_disk(tensors: Any, path: Path, metadata: Any) -> None:
    Path(path).write_bytes(b"the beginning")
    raise OSError(errno.ENOSPC, "No space left on device")


def faulty_disk(tensors: dict[str, torch.Tensor], path: Path, metadata: Any) -> None:
    SAVE_FILE({**tensors, "two": tensors["two"] + 1}, path, metadata=metadata)


SAVE_FILE = export.save_file


# Mutations: write into the directory itself; take the old one away first; do not read back.
@pytest.mark.parametrize(("disk", "message"), [(full_disk, "No space left"), (faulty_disk, "tensor two differs")])
def test_a_disk_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Any, message: str) -> None:
    save(tmp_path / "model", 1.0)
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    monkeypatch.setattr(export, "save_file", disk)
    for name in ("model", "another"):
        with pytest.raises(OSError, match=message):
            save(tmp_path / name, 2.0)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_ranks_that_do_not_write_take_part_all_the_same(tmp_path: Path) -> None:
    # Gathering is a collective: a rank that stops consuming would keep the others waiting.
    taken = iter([("one", torch.zeros(1)), ("two", torch.zeros(1))])
    save_checkpoint(taken, None, None, tmp_path / "model", writes=False)
    assert next(taken, None) is None
    assert not any(tmp_path.iterdir())

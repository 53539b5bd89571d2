from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import model as model_module
from engine.atomic import atomic_directory
from engine.config import ArchitectureConfig, GgufConfig, ModelConfig
from engine.digest import directory_digest
from engine.model import create, model_digest_key

TINY = ModelConfig(
    architecture=ArchitectureConfig(hidden_size=32, layers=1, attention_heads=2, key_value_heads=1, feed_forward_size=32, max_context_tokens=64)
)


def test_a_model_from_scratch_is_an_ordinary_directory(tmp_path: Path) -> None:
    directory = create(TINY, 3, tmp_path / "model")
    files = {file.name for file in directory.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert loaded.config.architectures == ["Qwen3ForCausalLM"]
    assert loaded.config.vocab_size == len(tokenizer)
    assert loaded.dtype is torch.float32
    assert loaded.config.max_position_embeddings == 64
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert tokenizer.chat_template
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


# Mutation: leave out manual_seed, or seed by a constant.
def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    one, same, other = (directory_digest(create(TINY, seed, tmp_path / name)) for seed, name in [(1, "one"), (1, "same"), (2, "other")])
    assert one == same
    assert one != other


# Mutation: manual_seed without fork_rng.
def test_the_global_random_state_stays(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    create(TINY, 1, tmp_path / "model")
    assert torch.equal(before, torch.random.get_rng_state())


# Mutation: always make the model anew.
def test_a_complete_model_is_reused(tmp_path: Path) -> None:
    directory = create(TINY, 1, tmp_path / "model")
    (directory / "config.json").write_text("touched")
    assert create(TINY, 1, directory) == directory
    assert (directory / "config.json").read_text() == "touched"


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        create(TINY, 1, tmp_path)


# Mutation: write into the directory itself.
def test_nothing_is_left_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = type("Broken", (), {"chat_template": "x", "save_pretrained": lambda self, path: (_ for _ in ()).throw(OSError("No space left"))})()
    weights = type("Weights", (), {"save_pretrained": lambda self, path: (path / "config.json").write_text("{}")})()
    monkeypatch.setattr(model_module, "_load", lambda *_: (weights, tokenizer))
    with pytest.raises(OSError, match="No space left"):
        create(TINY, 1, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_chat_template_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_load", lambda *_: (None, type("Plain", (), {"chat_template": None})()))
    with pytest.raises(ValueError, match="has no chat template"):
        create(TINY, 1, tmp_path / "model")


def test_a_local_model_is_taken_over(tmp_path: Path) -> None:
    first = create(TINY, 1, tmp_path / "first")
    second = create(ModelConfig(path=str(first)), 0, tmp_path / "second")
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    assert AutoTokenizer.from_pretrained(second).chat_template == AutoTokenizer.from_pretrained(first).chat_template


def test_sources_that_do_not_exist_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"model\.path: .*empty is neither"):
        create(ModelConfig(path=str(tmp_path / "empty")), 0, tmp_path / "model")
    with pytest.raises(ValueError, match=r"model\.gguf\.package: no_such_package is not installed"):
        create(ModelConfig(gguf=GgufConfig(package="no_such_package", file="x.gguf")), 0, tmp_path / "model")
    with pytest.raises(ValueError, match=r"model\.gguf\.file: engine has no x\.gguf"):
        model_digest_key(ModelConfig(gguf=GgufConfig(package="engine", file="x.gguf")), 0)


# Mutation: leave the seed, or the contents of a local directory, out of the key.
def test_the_key_is_what_decides_the_weights(tmp_path: Path) -> None:
    assert model_digest_key(TINY, 1) == model_digest_key(TINY.model_copy(update={"dtype": "bfloat16"}), 1)
    assert model_digest_key(TINY, 1) != model_digest_key(TINY, 2)
    assert model_digest_key(TINY, 1) != model_digest_key(ModelConfig(architecture=ArchitectureConfig()), 1)
    local = ModelConfig(path=str(tmp_path))
    (tmp_path / "config.json").write_text("a")
    before = model_digest_key(local, 1)
    assert before == model_digest_key(local, 2)
    (tmp_path / "config.json").write_text("b")
    assert before != model_digest_key(local, 1)


# Mutation: hash contents without names, or names in the order of the file system.
def test_a_directorys_digest_sees_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_text("1")
    digests = [directory_digest(tmp_path)]
    (tmp_path / "b").write_text("1")
    digests.append(directory_digest(tmp_path))
    (tmp_path / "b").rename(tmp_path / "c")
    digests.append(directory_digest(tmp_path))
    (tmp_path / "c").write_text("2")
    digests.append(directory_digest(tmp_path))
    assert len(set(digests)) == 4
    # Derivation: sha256 of the line "NAME\0SHA256_OF_CONTENT\n"; the content is "1".
    (tmp_path / "c").unlink()
    assert directory_digest(tmp_path) == digests[0] == "4cbfd9cfff130516dc28242fe84bb952e3d11fc455b10afaf31ad1964be07d2b"


def half_written(directory: Path) -> None:
    (directory / "file").write_text("half")
    raise OSError("disk full")


# Mutation: remove the old directory before the block runs.
def test_an_old_directory_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with atomic_directory(place) as fresh:
        (fresh / "file").write_text("old")
    with pytest.raises(OSError, match="disk full"), atomic_directory(place) as fresh:
        half_written(fresh)
    assert (place / "file").read_text() == "old"
    with atomic_directory(place) as fresh:
        (fresh / "file").write_text("new")
    assert (place / "file").read_text() == "new"
    assert list(tmp_path.iterdir()) == [place]

"""The first weights: an ordinary Hugging Face directory, made from an architecture, a GGUF file, or another such directory."""

import hashlib
import importlib.util
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.atomic import atomic_directory
from engine.config import ArchitectureConfig, GgufConfig, ModelConfig
from engine.digest import directory_digest, file_digest
from engine.tokenizer import character_tokenizer


def create(model: ModelConfig, seed: int, directory: Path) -> Path:
    """Makes `directory` a Hugging Face model (safetensors, configuration, tokenizer with chat template), and returns it.

    It appears complete or not at all, so one that is there already is taken as it is: name it by `model_digest_key`.

    Args:
        model: where the weights come from. A relative `path` starts at the working directory.
        seed: of random weights; without meaning for the other sources.
        directory: where the model goes.

    Raises:
        ValueError: the source does not exist, does not load, or has no chat template; the key is named.
    """
    if directory.exists():
        if not (directory / "config.json").is_file():
            raise ValueError(f"{directory} exists and is not a model directory (it has no config.json); move it away or delete it")
        return directory
    made, tokenizer = _load(model, seed)
    if not tokenizer.chat_template:
        raise ValueError(
            "model: its tokenizer has no chat template, and prompts are chats; choose an instruction-tuned model, or add a template to it"
        )
    with atomic_directory(directory) as fresh:
        made.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
    return directory


def model_digest_key(model: ModelConfig, seed: int) -> str:
    """64 hex digits that name what `create` would make: equal keys, equal directories.

    The type that is computed in does not count, and the seed counts for random weights only. A hub name counts by name, though what lies
    behind it may change.

    Raises:
        ValueError: the GGUF file does not exist.
    """
    source: dict[str, object]
    if model.architecture is not None:
        tokenizer = character_tokenizer(model.architecture.max_context_tokens)
        source = {
            "architecture": model.architecture.model_dump(mode="json"),
            "seed": seed,
            "tokenizer": [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template],
        }
    elif model.gguf is not None:
        source = {"gguf": file_digest(_gguf_file(model.gguf))}
    else:
        path = Path(str(model.path))
        source = {"path": directory_digest(path) if path.is_dir() else str(model.path)}
    return hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()


def configuration(model: ModelConfig) -> PreTrainedConfig:
    """The architecture of what `create` would make, as transformers describes it, without any weights.

    Raises:
        ValueError: the source does not exist or has no configuration; the key is named.
    """
    if model.architecture is not None:
        return _architecture_config(model.architecture, character_tokenizer(model.architecture.max_context_tokens))
    if model.gguf is not None:
        file = _gguf_file(model.gguf)
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    try:
        return AutoConfig.from_pretrained(model.path)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: {model.path} is neither a local model directory nor a hub name that can be loaded: {error}") from error


def _load(model: ModelConfig, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if model.architecture is not None:
        return _from_architecture(model.architecture, seed)
    if model.gguf is not None:
        return _from_gguf(model.gguf)
    try:
        return AutoModelForCausalLM.from_pretrained(model.path, dtype="auto"), AutoTokenizer.from_pretrained(model.path)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: {model.path} is neither a local model directory nor a hub name that can be loaded: {error}") from error


def _from_architecture(architecture: ArchitectureConfig, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Random float32 weights, a function of the architecture and `seed`; the global random state stays as it was."""
    tokenizer = character_tokenizer(architecture.max_context_tokens)
    config = _architecture_config(architecture, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model, tokenizer


def _architecture_config(architecture: ArchitectureConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    return AutoConfig.for_model(
        architecture.family,
        vocab_size=len(tokenizer),
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.feed_forward_size,
        num_hidden_layers=architecture.layers,
        num_attention_heads=architecture.attention_heads,
        num_key_value_heads=architecture.key_value_heads,
        head_dim=architecture.head_dim,
        max_position_embeddings=architecture.max_context_tokens,
        tie_word_embeddings=architecture.tie_embeddings,
        initializer_range=architecture.initializer_range,
        rope_parameters={"rope_type": "default", "rope_theta": architecture.rope_theta},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _from_gguf(gguf: GgufConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The file's weights, dequantized to float32.

    What `from_pretrained(gguf_file=...)` does, without its need for the package accelerate.
    """
    file = _gguf_file(gguf)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)["tensors"]
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    # A tied head is not in the file, and is no longer on the meta device once it is tied.
    if unexpected or any(model.get_parameter(name).is_meta for name in missing):
        raise ValueError(f"model.gguf: {file} does not hold the weights of a {config.model_type} model: missing {missing}, unexpected {unexpected}")
    return model, tokenizer


def _gguf_file(gguf: GgufConfig) -> Path:
    # Found without importing: the package's own code may need libraries that are not installed.
    specification = importlib.util.find_spec(gguf.package)
    locations = specification.submodule_search_locations if specification else None
    if not locations:
        raise ValueError(f"model.gguf.package: {gguf.package} is not installed; `make setup` installs it, or pip with --no-deps")
    file = Path(locations[0]) / gguf.file
    if not file.is_file():
        there = ", ".join(sorted(p.name for p in file.parent.glob("*.gguf"))) or "none"
        raise ValueError(f"model.gguf.file: {gguf.package} has no {gguf.file}; its GGUF files: {there}")
    return file

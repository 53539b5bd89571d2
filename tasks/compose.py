"""Hydra composes conf/, pydantic checks the result: from `recipe=NAME key=value ...` to one frozen configuration, or to all errors at once.

An override may name any key that the configuration classes know, whether or not a file under conf/ mentions it.
"""

import os
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from engine.config import ModelConfig
from tasks import schema
from tasks.check import check, did_you_mean
from tasks.config import RecipeConfig
from tasks.problems import ConfigurationError, Problem
from tasks.workspace import conf_directory

# Hydra has one global state, which two threads cannot share.
_one_at_a_time = threading.Lock()


def compose(overrides: Sequence[str]) -> RecipeConfig:
    """Configuration of a recipe.

    `overrides` are in Hydra's grammar: `recipe=NAME` (needed), `resources=one_cpu` or `algorithm@stages.rl.algorithm=dr_grpo` to swap the
    file of a group, `stages.rl.steps=40` to set a value, `~stages.sft` to take one out.

    Raises ConfigurationError with a line for each problem.
    """
    parsed, problems = _parse(overrides)
    recipe, more = _recipe(parsed)
    problems += more
    # With no recipe, what the overrides get wrong by themselves is reported all the same.
    chosen = f"recipe={recipe}" if recipe else "~recipe"
    try:
        config = base = _hydra([chosen])
        swaps, more = _swaps(parsed, base, complete=recipe is not None)
        problems += more
        if swaps:
            config = _hydra([chosen, *swaps])
        config = config.copy()
        problems += _set(config, parsed, complete=recipe is not None)
        data = _plain(config)
    except OmegaConfBaseException as error:
        raise ConfigurationError([*problems, Problem(error.full_key or "", str(error).splitlines()[0])]) from error
    except (HydraException, yaml.YAMLError) as error:
        raise ConfigurationError([*problems, Problem("", " ".join(str(error).split()))]) from error
    fallback = _plain(base, resolve=False)
    if recipe:
        for plain in (data, fallback):
            plain["stages"] = _in_written_order(plain.get("stages"), recipe)
    checked, more = check(data, fallback, complete=recipe is not None)
    if problems or checked is None:
        raise ConfigurationError([*problems, *more])
    return checked


def split_recipe(overrides: Sequence[str]) -> tuple[str, list[str]]:
    """The recipe that overrides name, and the others. They are those of a configuration that `compose` has made."""
    recipe, problems = _recipe(_parse(overrides)[0])
    if recipe is None:
        raise ConfigurationError(problems)
    return recipe, [text for text in overrides if not any(override.key_or_group == "recipe" for override in _parse([text])[0])]


def choices(group: str) -> dict[str, str]:
    """Files of a group of conf/, each with what its first comment says."""
    return {path.stem: _first_comment(path) for path in sorted((conf_directory() / group).glob("*.yaml"))}


def model_of(name: str) -> ModelConfig:
    """What a file of conf/model says, without a recipe around it."""
    file = cast(DictConfig, OmegaConf.load(conf_directory() / "model" / f"{name}.yaml"))
    return ModelConfig.model_validate(OmegaConf.to_container(file, resolve=True))


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-05 is a number, as in 1.2, which DVC writes: PyYAML's 1.1 asks for 1.0e-05."""


class _Dumper(yaml.SafeDumper):
    """Its twin: text that looks like such a number goes into quotes."""


_EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def write_resolved(config: RecipeConfig, path: Path) -> None:
    """Write every setting, defaults included, as YAML that `load_resolved` reads."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    # Escaped beyond ASCII: PyYAML writes some characters bare that it reads back as line breaks (U+0085).
    beside.write_text(yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, width=140), encoding="utf-8")
    beside.replace(path)


def load_resolved(path: Path) -> RecipeConfig:
    """Read what `write_resolved` wrote, or what a person or DVC made of it. Raises ConfigurationError where that is no valid configuration."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigurationError([Problem("", f"{path} is not YAML: {' '.join(str(error).split())}")]) from error
    config, problems = check(data, fallback={})
    if config is None:
        raise ConfigurationError([Problem(problem.key, f"{problem.text} (in {path})") for problem in problems])
    return config


def _parse(overrides: Iterable[str]) -> tuple[list[Override], list[Problem]]:
    parser, parsed, problems = OverridesParser.create(), [], []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            reason = str(error).splitlines()[0]
            problems.append(Problem(text, f"not of the form key=value ({reason}); put a value with special characters into quotes: key='...'"))
            continue
        if override.is_sweep_override():
            problems.append(Problem(override.key_or_group, f"{text} is a sweep over several values; give one (a list is written [1,2])"))
        else:
            parsed.append(override)
    return parsed, problems


def _recipe(parsed: Iterable[Override]) -> tuple[str | None, list[Problem]]:
    known = choices("recipe")
    given = [str(override.value()) for override in parsed if override.key_or_group == "recipe"]
    there_are = f"there are: {', '.join(known)}"
    if len(given) != 1:
        return None, [Problem("recipe", f"{'given more than once' if given else 'not given'}; say recipe=NAME once; {there_are}")]
    if given[0] not in known:
        return None, [Problem("recipe", f"unknown recipe '{given[0]}'{did_you_mean(given[0], known)}; {there_are}")]
    return given[0], []


def _swaps(parsed: Iterable[Override], base: DictConfig, *, complete: bool) -> tuple[list[str], list[Problem]]:
    """Those overrides that swap the file of a group, for Hydra."""
    usable: list[str] = []
    problems: list[Problem] = []
    groups = _groups()
    for override in parsed:
        if not _is_swap(override) or override.key_or_group == "recipe":
            continue
        line = _group(override, groups, dict(base.hydra.runtime.choices))
        if isinstance(line, Problem):
            problems.append(line)
        elif complete or override.package is None:
            # Without its recipe, a file for a stage would interpolate what is not there.
            usable.append(line)
    return usable, problems


def _set(config: DictConfig, parsed: Iterable[Override], *, complete: bool) -> list[Problem]:
    """Applies the other overrides to `config`. Any key goes, as in Hydra's `++key=value`: `check` knows the classes, Hydra only the files."""
    problems = []
    parsed = [override for override in parsed if not _is_swap(override)]
    for override in parsed:
        _begin_anew(config, override)
    for override in parsed:
        key = override.key_or_group
        if key.split(".")[0] == "hydra":
            problems.append(Problem(key, "Hydra only composes here; its own settings have no effect. Take it out"))
        elif override.is_delete():
            above, _, last = key.rpartition(".")
            holder = OmegaConf.select(config, above) if above else config
            if isinstance(holder, DictConfig) and last in holder:
                with open_dict(config):
                    del holder[last]
            elif complete:
                problems.append(Problem(key, "cannot be taken out: the recipe does not set it"))
        else:
            value = override.value()
            OmegaConf.update(config, key, value, merge=isinstance(value, dict), force_add=True)
    return problems


def _begin_anew(config: DictConfig, override: Override) -> None:
    """Where another estimator or loss is named than a file does, the file's settings beside it go: they are the other one's."""
    key, value = override.key_or_group, None if override.is_delete() else override.value()
    if isinstance(value, dict):
        selects = schema.tag_field(schema.at(key.split(".")))
        key, value = f"{key}.{selects}", value.get(selects)
    above, _, selects = key.rpartition(".")
    variants = schema.at(above.split("."))
    default = schema.default_tag(variants)
    if value is None or default is None or selects != schema.tag_field(variants):
        return
    holder = OmegaConf.select(config, above)
    if isinstance(holder, DictConfig) and holder.get(selects, default) != value:
        OmegaConf.update(config, above, {}, merge=False)


def _groups() -> list[str]:
    # Not conf/reference, which holds JSON.
    return sorted({path.parent.name for path in conf_directory().glob("*/*.yaml")})


def _is_swap(override: Override) -> bool:
    key = override.key_or_group
    return override.package is not None or "/" in key or (key in _groups() and not isinstance(override.value(), dict))


def _group(override: Override, groups: list[str], chosen: dict[str, Any]) -> str | Problem:
    """The override that swaps the file of a group, or what is wrong with it."""
    group, name = override.key_or_group, override.value()
    if group not in groups:
        return Problem(group, f"unknown group{did_you_mean(group, groups)}; there are: {', '.join(groups)}")
    places = [place for place in chosen if place.partition("@")[0] == group]
    place = f"{group}@{override.package}" if override.package else group
    if override.is_delete():
        return f"~{place}" if place in chosen else Problem(place, f"cannot be taken out: the recipe uses {', '.join(places) or 'none'}")
    known = choices(group)
    if not isinstance(name, str) or name not in known:
        name = "null" if name is None else name
        return Problem(place, f"there is no conf/{group}/{name}.yaml{did_you_mean(str(name), known)}; there are: {', '.join(known)}")
    if place in chosen:
        return f"{place}={name}"
    if override.package is None and group not in RecipeConfig.model_fields:
        examples = [f"{known_place}={name}" for known_place in places] or [f"{group}@stages.NAME.{group}={name}"]
        return Problem(group, f"belongs to a stage; say {' or '.join(examples)}")
    return f"+{place}={name}"


def _hydra(overrides: list[str]) -> DictConfig:
    with _one_at_a_time:
        # A caller, such as a notebook, may have a Hydra of its own.
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(conf_directory()), version_base="1.3", job_name="almanac"):
            return hydra_compose("config", overrides, return_hydra_config=True)


def _plain(config: DictConfig, *, resolve: bool = True) -> dict[str, Any]:
    config = config.copy()
    with open_dict(config):
        del config["hydra"]
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve))


def _in_written_order(stages: Any, recipe: str) -> Any:
    """Stages in the order in which the recipe's file writes them; Hydra would begin with those that its defaults list mentions first."""
    if not isinstance(stages, dict):
        return stages
    written = _written_stages(recipe)
    return {name: stages[name] for name in sorted(stages, key=lambda name: written.index(name) if name in written else len(written))}


def _written_stages(recipe: str) -> list[str]:
    """Names of a recipe's stages: those of the recipe that its defaults list begins with, and its own before the one that it writes next."""
    file = cast(DictConfig, OmegaConf.load(conf_directory() / "recipe" / f"{recipe}.yaml"))
    own, known = list(file.get("stages") or {}), choices("recipe")
    order = [stage for base in file.get("defaults") or [] if base in known for stage in _written_stages(base)]
    for place in reversed(range(len(own))):
        if own[place] not in order:
            order.insert(next((order.index(name) for name in own[place + 1 :] if name in order), len(order)), own[place])
    return order


def _first_comment(path: Path) -> str:
    lines = (line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    # "# @package _global_" speaks to Hydra.
    return next((line for line in lines if not line.startswith("@")), "")

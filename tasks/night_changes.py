"""What is different from the last good night: code, configuration, data and packages."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks import nights
from tasks.nights import NightRecord, RecipeNight
from tasks.record import git

COMMITS = 40
"""That are listed, at most."""
PATCH_LINES = 400
"""Of what is not committed, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Since the last good night of a recipe; without one, what is known of tonight."""

    since: str | None
    """That night. None: there is none."""
    commits: list[str]
    """Newest first, with their titles."""
    files: str
    """Files that the commits changed, as `git diff --stat` says it."""
    patch: str
    """What is in no commit, tonight."""
    configuration: list[tuple[str, str, str]]
    """(key, then, now), without the seed."""
    data: list[tuple[str, str, str]]
    """(split, digest then, now)."""
    data_from_seed: bool
    """The data are generated from the seed, which is another one every night: their digests cannot be equal."""
    packages: list[tuple[str, str, str]]
    """(name, version then, now); `-` where it was not there."""
    hardware: list[tuple[str, str, str]]


def changes(night: NightRecord, recipe: RecipeNight) -> Changes:
    """Tonight beside the last good night."""
    good = nights.last_good(recipe.name, night.night)
    base = None if good is None else good[0].commit
    between = None if base is None or night.commit is None else f"{base}..{night.commit}"
    then, now = (None if good is None else good[1].lineage), recipe.lineage
    return Changes(
        since=None if good is None else good[0].night,
        commits=_lines(git("log", "--oneline", "--no-decorate", f"-{COMMITS}", between)) if between else [],
        files=(git("diff", "--stat=110", between) or "") if between else "",
        patch="\n".join(_lines((nights.directory(night.night) / nights.PATCH).read_text())[:PATCH_LINES]),
        configuration=[
            change for change in _different({} if good is None else good[1].configuration, recipe.configuration, good is None) if change[0] != "seed"
        ],
        data=_different(then.dataset_digests if then else {}, now.dataset_digests if now else {}, then is None or now is None),
        data_from_seed=recipe.configuration["data"].get("chain_sum") is not None,
        packages=_different({} if good is None else good[0].packages, night.packages, good is None),
        hardware=_different(then.hardware if then else {}, now.hardware if now else {}, then is None or now is None),
    )


def _lines(text: str | None) -> list[str]:
    return (text or "").splitlines()


def _different(then: Mapping[str, Any], now: Mapping[str, Any], unknown: bool) -> list[tuple[str, str, str]]:
    """What differs between two mappings of mappings, by dotted key; nothing where one of the two is unknown."""
    if unknown:
        return []
    before, after = dict(_leaves(then)), dict(_leaves(now))
    keys = sorted(before.keys() | after.keys())
    return [(key, before.get(key, "-"), after.get(key, "-")) for key in keys if before.get(key) != after.get(key)]


def _leaves(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, f"{above}{key}.")
        else:
            yield f"{above}{key}", str(item)

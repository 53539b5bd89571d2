"""What differs between what two runs were made from: code, configuration, data, packages and machine."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.checkout import git
from tasks.lineage import Lineage

COMMITS = 40
"""That are listed, at most."""

Change = tuple[str, str, str]
"""(what, then, now); `-` where it was not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """From one lineage to another."""

    commits: list[str]
    """That are new, newest first, with their titles."""
    commits_gone: list[str]
    """That the other one lacks."""
    files: str
    """Files that the commits changed, as `git diff --stat` says it."""
    code: list[Change]
    """Commit, difference that is in no commit, modules of one's own."""
    configuration: list[Change]
    """By dotted key."""
    data: list[Change]
    """Input files, prepared splits and base model, by digest."""
    packages: list[Change]
    """Versions, and the lock file's digest."""
    hardware: list[Change]

    def parts(self) -> dict[str, list[Change]]:
        """All that differs, by what it is."""
        return {
            "code": self.code,
            "configuration": self.configuration,
            "data": self.data,
            "packages": self.packages,
            "machine": self.hardware,
        }


def between(then: Lineage, now: Lineage) -> Differences:
    """All that is not equal."""
    one, other = then.commit, now.commit
    known = one is not None and other is not None and one != other
    return Differences(
        commits=_log(f"{one}..{other}") if known else [],
        commits_gone=_log(f"{other}..{one}") if known else [],
        files=(git("diff", "--stat=110", f"{one}..{other}") or "") if known else "",
        code=different(_code(then), _code(now)),
        configuration=different(then.configuration, now.configuration),
        data=different(*_data(then, now)),
        packages=different({"lock file": then.lock_digest, **then.packages}, {"lock file": now.lock_digest, **now.packages}),
        hardware=different(then.hardware, now.hardware),
    )


def different(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What differs between two mappings of mappings, by dotted key."""
    before, after = ({key: str(value) for key, value in leaves(one)} for one in (then, now))
    keys = sorted(before.keys() | after.keys())
    return [(key, before.get(key, "-"), after.get(key, "-")) for key in keys if before.get(key) != after.get(key)]


def leaves(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """What stands in a mapping of mappings, by dotted key; an empty mapping is a value of its own."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from leaves(item, f"{above}{key}.")
        else:
            yield f"{above}{key}", item


def _log(revisions: str) -> list[str]:
    return (git("log", "--oneline", "--no-decorate", f"-{COMMITS}", revisions) or "").splitlines()


def _code(lineage: Lineage) -> dict[str, Any]:
    return {
        "commit": lineage.commit or "unknown",
        "uncommitted difference": lineage.patch_digest or "none",
        **{f"module {name}": digest for name, digest in lineage.own_modules.items()},
    }


def _data(*lineages: Lineage) -> list[dict[str, Any]]:
    """Of each; splits and base model where all have them: a run that ended before it had made them says nothing about them."""
    splits, model = all(one.dataset_digests for one in lineages), all(one.base_model_digest for one in lineages)
    return [
        {f"{key} {file.path}": file.sha256 for key, file in one.inputs.items()}
        | ({f"split {name}": digest for name, digest in one.dataset_digests.items()} if splits else {})
        | ({"base model": one.base_model_digest} if model else {})
        for one in lineages
    ]

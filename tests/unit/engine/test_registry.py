"""Registries: every name loads, describes itself without being imported, and configuration takes exactly the names that there are."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from engine.algorithms import aggregation
from engine.algorithms.registry import ADVANTAGES, LOSSES
from engine.config import AdvantageConfig, LossConfig, RewardConfig
from engine.rewards.registry import REWARDS
from engine.rollout import registry as rollout
from engine.rollout.backend import RolloutBackend
from engine.training import registry as training
from engine.training.backend import TrainingBackend
from engine.workers.base import Annotator
from engine.workers.registry import ANNOTATORS


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}


PROTOCOLS = [
    (rollout.BACKENDS, public(RolloutBackend)),
    (training.BACKENDS, public(TrainingBackend)),
    (ANNOTATORS, public(Annotator) - {"prompts_of"}),  # which only the annotator itself calls
]


@pytest.mark.parametrize("registry", [ADVANTAGES, LOSSES, REWARDS])
def test_every_entry_loads_and_describes_itself(registry) -> None:
    for name in registry.names():
        function = registry.get(name)
        assert callable(function)
        assert registry.describe(name)
        assert registry.describe(name) == function.__doc__.partition("\n")[0]


def test_the_page_of_algorithms_has_a_row_for_each() -> None:
    # Mutation: a new estimator, loss or aggregation without its row.
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = {name for line in page.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert rows == {*ADVANTAGES.names(), *LOSSES.names(), *aggregation.names()}


@pytest.mark.parametrize(("registry", "config", "key"), [(ADVANTAGES, AdvantageConfig, "estimator"), (LOSSES, LossConfig, "name")])
def test_configuration_takes_every_registered_name_and_a_place_of_ones_own(registry, config, key: str) -> None:
    # Mutation: a Literal of names beside the registry, which falls behind it.
    for name in [*registry.names(), "my_package.mine:function"]:
        assert getattr(TypeAdapter(config).validate_python({key: name}), key) == name


@pytest.mark.parametrize(
    ("config", "setting", "nearest"),
    [
        (AdvantageConfig, {"estimator": "grpoo"}, "estimator: no advantage estimator is called 'grpoo': did you mean grpo?"),
        (LossConfig, {"name": "ppoo"}, "name: no policy loss is called 'ppoo': did you mean ppo?"),
        (RewardConfig, {"default": "exact_mach"}, "no reward is called 'exact_mach': did you mean exact_match?"),
        (RewardConfig, {"by_data_source": {"a": "exact_mach"}}, "no reward is called 'exact_mach': did you mean exact_match?"),
    ],
)
def test_configuration_refuses_an_unknown_name_and_suggests_the_nearest(config, setting: dict[str, object], nearest: str) -> None:
    # Mutation: leave `known` out of the validator: it would be found when the first step is over.
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(config).validate_python(setting)
    assert nearest in str(caught.value)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no reward is called 'exact_mach': did you mean exact_match\? There are: exact_match, format, "):
        REWARDS.get("exact_mach")
    with pytest.raises(ValueError, match=r"no policy loss is called 'zzz'\. There are: "):
        LOSSES.describe("zzz")


def test_a_place_of_ones_own_is_imported_when_it_is_used() -> None:
    assert LOSSES.get("engine.algorithms.ppo:loss") is LOSSES.get("ppo")


@pytest.mark.parametrize("place", ["no_such_package.mine:loss", "engine.algorithms.ppo:no_such_loss"])
def test_a_place_that_cannot_be_imported_says_so(place: str) -> None:
    # Mutation: let ImportError or AttributeError through: a user then reads a traceback instead of a setting's name.
    with pytest.raises(ValueError, match=rf"policy loss {place} cannot be imported .*PYTHONPATH"):
        LOSSES.get(place)


def test_listing_imports_neither_torch_nor_sympy() -> None:
    # Mutation: import a loss's module at the top of the registry.
    code = (
        "import sys\n"
        "from engine.algorithms.registry import ADVANTAGES, LOSSES\n"
        "from engine.rewards.registry import REWARDS\n"
        "[r.describe(n) for r in (ADVANTAGES, LOSSES, REWARDS) for n in r.names()]\n"
        "sys.exit(bool({'torch', 'sympy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module of one's own and puts it on the path. Returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def write(text: str) -> str:
        names.append(f"module_of_ones_own_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(text)
        importlib.invalidate_caches()
        return names[-1]

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_a_misspelt_attribute_suggests_the_nearest(own) -> None:
    place = own("def reinforce(inputs, config): ...") + ":reinfroce"
    with pytest.raises(ValueError, match=f"policy loss {place} cannot be imported .*did you mean reinforce"):
        LOSSES.get(place)


@pytest.mark.parametrize("text", ["1 / 0", "def loss(:"])
def test_a_module_that_raises_is_named_with_what_it_raises(own, text: str) -> None:
    # Mutation: catch ImportError alone: preflight then ends with somebody's traceback, and the other findings are lost.
    with pytest.raises(ValueError, match=r"policy loss module\S* cannot be imported: its module raises (ZeroDivisionError|SyntaxError): "):
        LOSSES.get(own(text) + ":loss")


def test_something_else_than_what_the_key_asks_for_is_refused(own) -> None:
    # Mutations: leave out `callable`, or `methods`: a worker would be the first to see it, minutes later.
    with pytest.raises(ValueError, match=r"policy loss module\S* is a float, and must be a function or a class"):
        LOSSES.get(own("loss = 1.0") + ":loss")
    for registry, methods in PROTOCOLS:
        first, *others = methods
        definitions = "".join(f"    def {method}(self): ...\n" for method in others)
        with pytest.raises(ValueError, match=rf"\S+ has no method {first}; it needs: "):
            registry.get(own(f"class Mine:\n{definitions}") + ":Mine")
        assert registry.get(own(f"class Mine:\n{definitions}    def {first}(self): ...\n") + ":Mine").__name__ == "Mine"


def test_registries_ask_for_the_methods_of_their_protocols() -> None:
    # Mutation: a new method of a protocol without its name in the registry.
    for registry, methods in PROTOCOLS:
        assert set(registry.methods) == methods

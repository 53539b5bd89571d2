"""Registries: every name loads, describes itself without being imported, and configuration takes exactly the names that there are."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from engine.algorithms.registry import ADVANTAGES, LOSSES
from engine.config import AdvantageConfig, LossConfig, RewardConfig
from engine.rewards.registry import REWARDS


@pytest.mark.parametrize("registry", [ADVANTAGES, LOSSES, REWARDS])
def test_every_entry_loads_and_describes_itself(registry) -> None:
    for name in registry.names():
        function = registry.get(name)
        assert callable(function)
        assert registry.describe(name)
        assert registry.describe(name) == function.__doc__.partition("\n")[0]


@pytest.mark.parametrize(
    ("registry", "config", "key"), [(ADVANTAGES, AdvantageConfig, "estimator"), (LOSSES, LossConfig, "name"), (REWARDS, RewardConfig, "default")]
)
def test_configuration_takes_every_registered_name_and_a_place_of_ones_own(registry, config, key: str) -> None:
    # Mutation: a Literal of names beside the registry, which falls behind it.
    for name in [*registry.names(), "my_package.mine:function"]:
        assert getattr(config(**{key: name}), key) == name


@pytest.mark.parametrize(
    ("config", "setting", "nearest"),
    [
        (AdvantageConfig, {"estimator": "grpoo"}, "estimator: no advantage estimator is called 'grpoo': did you mean grpo?"),
        (LossConfig, {"name": "ppoo"}, "name: no policy loss is called 'ppoo': did you mean ppo?"),
        (RewardConfig, {"default": "exact_mach"}, "default: no reward is called 'exact_mach': did you mean exact_match?"),
        (RewardConfig, {"by_data_source": {"a": "exact_mach"}}, r"by_data_source.a: no reward is called 'exact_mach': did you mean exact_match?"),
    ],
)
def test_configuration_refuses_an_unknown_name_and_suggests_the_nearest(config, setting: dict[str, object], nearest: str) -> None:
    # Mutation: leave `known` out of the validator: it would be found when the first step is over.
    with pytest.raises(ValidationError) as caught:
        config(**setting)
    assert nearest in str(caught.value)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no reward is called 'exact_mach': did you mean exact_match\? There are: exact_match, math_verify"):
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

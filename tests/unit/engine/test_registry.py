"""Registries: every name loads, describes itself without being imported, and agrees with the configuration."""

import subprocess
import sys
from typing import get_args

import pytest

from engine.algorithms.registry import ADVANTAGES, LOSSES
from engine.config import AdvantageConfig, LossConfig
from engine.rewards.registry import REWARDS


@pytest.mark.parametrize("registry", [ADVANTAGES, LOSSES, REWARDS])
def test_every_entry_loads_and_describes_itself(registry) -> None:
    for name in registry.names():
        function = registry.get(name)
        assert callable(function)
        assert registry.describe(name)
        assert registry.describe(name) == function.__doc__.partition("\n")[0]


def test_configuration_offers_the_same_names() -> None:
    assert sorted(get_args(AdvantageConfig.model_fields["estimator"].annotation)) == ADVANTAGES.names()
    assert sorted(get_args(LossConfig.model_fields["name"].annotation)) == LOSSES.names()


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no reward is called 'exact_mach': did you mean exact_match\? There are: exact_match, math_verify"):
        rewards.get("exact_mach")
    with pytest.raises(ValueError, match=r"no policy loss is called 'zzz'\. There are: "):
        LOSSES.describe("zzz")


def test_listing_imports_neither_torch_nor_sympy() -> None:
    # Mutation: import a loss's module at the top of the registry.
    code = (
        "import sys\n"
        "from engine.algorithms.registry import ADVANTAGES, LOSSES\n"
        "from engine.rewards import registry, scoring\n"
        "[r.describe(n) for r in (ADVANTAGES, LOSSES, registry) for n in r.names()]\n"
        "sys.exit(bool({'torch', 'sympy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

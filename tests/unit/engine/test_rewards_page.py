"""docs/rewards.md does what it says: its examples are configuration that composes, and score what the page says they score."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import RewardConfig, RewardRunnerConfig
from engine.prompts import Prompt
from engine.rewards.calling import FIELDS
from engine.rewards.registry import REWARDS
from engine.rewards.scoring import Scored, Scoring
from tasks.compose import compose
from tasks.preflight import preflight
from tasks.workspace import checkout

PAGE = (checkout() / "docs" / "rewards.md").read_text(encoding="utf-8")
SERVICE, OWN = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
(CODE,) = re.findall(r"```python\n# my_support\.py\n(.*?)```", PAGE, re.DOTALL)
RUNNER = RewardRunnerConfig(processes=1)


def reward(settings: dict[str, Any]) -> RewardConfig:
    return RewardConfig(**settings["stages"]["rl"]["reward"], runner=RUNNER)


def scored(config: RewardConfig, source: str, *responses: tuple[str, int]) -> list[Scored]:
    prompt = Prompt(id="id", index=0, messages=({"role": "user", "content": "where is it"},), data_source=source, ground_truth="")
    with Scoring(config) as scoring:
        scoring.check(scoring.begin_canaries())
        return [scoring.result(scoring.begin(prompt, response, tokens, True)) for response, tokens in responses]


def test_the_customer_service_is_scored_as_the_table_says() -> None:
    # Mutations: a weight in the page, or in `rules`, that is another one.
    rows = re.findall(r"^\| ([A-Z].*?) \| (\d+) \| ([\d.-]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    found = scored(reward(SERVICE), "customer_service", *((text, int(tokens)) for text, tokens, _ in rows))
    assert [sample.reward for sample in found] == pytest.approx([float(score) for _, _, score in rows])
    assert set(found[0].parts) == {"manners", "greets", "asks_for_order", "promises_nothing", "brief", "overlong"}


def test_the_functions_of_ones_own_are_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_support.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = scored(reward(OWN), "any", ("Please wait, it is on its way.", 9))
    # One kind word; "it" and "is" of the three words of the question.
    assert found.parts == {"kind": 1.0, "kind_words": 1.0, "judged": pytest.approx(2 / 3)}
    assert found.reward == pytest.approx(1 + 0.5 * 2 / 3)


def overrides(settings: Any, path: str = "") -> list[str]:
    if isinstance(settings, dict):
        return [line for key, value in settings.items() for line in overrides(value, f"{path}.{key}" if path else key)]
    return [f"{path}={hydra(settings)}"]


def hydra(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(hydra, value)) + "]"
    if isinstance(value, str):
        return value if value.isidentifier() else f"'{value}'"
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_the_examples_compose_and_preflight_looks_at_the_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    (tmp_path / "my_support.py").write_text(CODE.replace("words: list[str]", "phrases: list[str]"))
    monkeypatch.syspath_prepend(tmp_path)
    # A sum as a whole takes the place of the default, whose part would stay beside those of the command line otherwise.
    lines = [*overrides(SERVICE), f"stages.rl.reward.default={hydra(OWN['stages']['rl']['reward']['default'])}"]
    config = compose(["recipe=grpo_tiny", *lines])
    given = config.stages["rl"].reward
    assert given.default == reward(OWN).default
    assert given.by_data_source["customer_service"] == reward(SERVICE).by_data_source["customer_service"]
    found = {finding.key: finding.text for finding in preflight(config) if "my_support" in finding.text}
    # Mutation: import the function without a look at its signature.
    assert list(found) == ["stages.rl.reward.default"]
    assert "my_support:kind has no parameter words; it has: phrases" in found["stages.rl.reward.default"]


def test_the_page_names_every_function_and_every_field() -> None:
    for name in [*REWARDS.names(), *FIELDS, "samples"]:
        assert f"| `{name}` |" in PAGE

"""What Prefect is told: a deployment for each recipe and each part of one, with parameters that the flows take."""

import importlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.exceptions import ParameterTypeError

from flows import deployments
from flows.nightly import LATEST, is_too_late
from flows.nightly_plan import references_for
from flows.stage import FLOWS
from tasks import workspace
from tasks.compose import choices
from tasks.problems import ConfigurationError
from tasks.stage_config import KINDS

DEPLOYMENTS = deployments.document()["deployments"]


def flow_of(deployment: dict[str, Any]) -> Flow:
    file, name = deployment["entrypoint"].split(":")
    return getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)


def test_the_file_is_what_the_recipes_say() -> None:
    """Mutation: a file in conf/recipe that is new, gone, or described otherwise."""
    written = (workspace.checkout() / deployments.FILE).read_text()
    assert written == deployments.text(), "write it anew: python -m flows.deployments"
    assert yaml.safe_load(written) == deployments.document()


def test_every_recipe_has_a_deployment_of_its_name_in_the_pool_of_its_devices() -> None:
    """Mutation: ask only the main pool, or take `auto` for a GPU."""
    pools = {one["name"]: one["work_pool"]["name"] for one in DEPLOYMENTS if one["entrypoint"] == "flows/recipe.py:recipe"}
    assert set(pools) == set(choices("recipe"))
    assert (pools["grpo_tiny"], pools["smollm2_sums"], pools["gsm8k_qwen2_5_0_5b"]) == ("cpu", "cpu", "gpu")


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda one: f"{one['entrypoint'].split(':')[1]}/{one['name']}")
def test_a_deployment_starts_a_flow_with_parameters_that_it_takes(deployment: dict[str, Any]) -> None:
    """Mutation: rename a parameter of a flow."""
    flow = flow_of(deployment)
    assert flow.name == deployment["entrypoint"].split(":")[1] == deployment["tags"][1]
    flow.validate_parameters(deployment["parameters"])
    assert set(deployment["parameters"]) == set(flow.parameters.properties)
    assert all(found["description"] for found in flow.parameters.properties.values())
    assert deployment["concurrency_limit"]["limit"] == 1


def test_nights_are_scheduled_and_do_not_queue_up() -> None:
    nights = {one["name"]: one for one in DEPLOYMENTS if one["entrypoint"] == "flows/nightly.py:nightly"}
    assert {pool: one["schedules"][0]["cron"] for pool, one in nights.items()} == {"cpu": "0 2 * * *", "gpu": "0 2 * * 6"}
    assert {one["concurrency_limit"]["collision_strategy"] for one in nights.values()} == {"CANCEL_NEW"}


def test_every_kind_of_stage_has_its_flow() -> None:
    assert set(FLOWS) == set(KINDS)


@pytest.mark.parametrize(
    "wrong", [{"recipe": "grpo_tny"}, {"overrides": ["no setting"]}, {"overrides": "seed=1"}, {"timeout_seconds": 0}, {"stage": 3}], ids=str
)
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    """Mutation: `str` in the place of any of the types in flows/parameters.py."""
    with pytest.raises(ParameterTypeError):
        FLOWS["rl"].validate_parameters({"recipe": "grpo_tiny", "stage": "rl"} | wrong)


def test_a_flow_of_one_kind_takes_no_stage_of_another() -> None:
    """Mutation: leave the check out; the pages would show RL under sft."""
    with pytest.raises(ValueError, match="stage rl of recipe grpo_tiny is of kind rl; start the flow of that kind"):
        FLOWS["sft"].fn("grpo_tiny", "rl")


def test_overrides_of_every_form_are_taken() -> None:
    given = ["seed=3", "~stages.sft", "+a=1", "algorithm@stages.rl.algorithm=gspo", "data.files=[a b]", "name='x y'"]
    assert FLOWS["rl"].validate_parameters({"recipe": "grpo_tiny", "stage": "rl", "overrides": given})["overrides"] == tuple(given)


def test_the_form_offers_the_recipes() -> None:
    assert FLOWS["rl"].parameters.properties["recipe"]["enum"] == list(choices("recipe"))


def test_deploying_to_no_server_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(deployments.DeploymentError, match=r"127\.0\.0\.1:9/api.*almanac up"):
        deployments.deploy()


def test_a_file_that_is_not_current_is_not_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployments, "FILE", "README.md")
    with pytest.raises(ValueError, match=r"README\.md is not what conf/recipe says.*python -m flows\.deployments"):
        deployments.deploy()


def test_a_night_that_is_hours_late_is_not_run() -> None:
    """Mutation: exchange the two; or cancel one that is only a little late."""
    due = datetime(2026, 12, 1, 2, tzinfo=UTC)
    assert is_too_late(due, due + LATEST + timedelta(seconds=1))
    assert not is_too_late(due, due + LATEST - timedelta(seconds=1))
    assert not is_too_late(due, due - timedelta(days=2))


def test_a_night_without_references_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"names: there is no reference yet of a recipe for gpu devices; `almanac reference make RECIPE`"):
        references_for("gpu")

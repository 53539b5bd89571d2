"""docs/extending.md, followed to the letter: its files written down, its lines given to the command, and a recipe run with all of them at once."""

import json
import os
import pickle
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_recipe import SMALL, Almanac

from engine.config import RewardConfig
from engine.control.host import Kept
from engine.events import SamplesGenerated, StepFinished
from tasks.compose import compose
from tasks.config import RecipeConfig
from tasks.journal import read_events
from tasks.workspace import checkout

PAGE = (checkout() / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = {
    match[1]: match[0] for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if (match := re.match(r"# (\w+\.py)\n.*", text, re.DOTALL))
}
YAML = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
LINES = [text for text in YAML if not text.startswith("#")]
(RESOURCES,) = (yaml.safe_load(text) for text in YAML if text.startswith("# conf/resources/judge.yaml"))
(COMMAND,) = re.findall(r"```\n(almanac run .*?)```", PAGE, re.DOTALL)
SIZES = [*SMALL, "stages.rl.keep_calls_every_steps=1"]
LIMIT_TOKENS, WEIGHT = 64, 0.1


def overrides(settings: Any, path: str = "") -> Iterator[str]:
    """Settings as `a.b=value`."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from overrides(value, f"{path}{key}.")
        else:
            yield f"{path}{key}={json.dumps(value) if not isinstance(value, str) else value}"


def of_the_command() -> list[str]:
    """Without the recipe, which the sizes name already."""
    almanac, run, recipe, *rest = shlex.split(COMMAND.replace("\\\n", ""))
    assert (almanac, run, recipe) == ("almanac", "run", "recipe=grpo_tiny")
    return rest


def of_the_resources() -> list[str]:
    """The file's settings; the test must not write into the checkout."""
    return list(overrides(RESOURCES, "resources."))


@pytest.fixture(scope="module")
def almanac(tmp_path_factory: pytest.TempPathFactory) -> Almanac:
    """Some files beside the caller, the others on PYTHONPATH."""
    root = tmp_path_factory.mktemp("root")
    beside, elsewhere = root / "beside", root / "elsewhere"
    for number, (name, text) in enumerate(FILES.items()):
        directory = (beside, elsewhere)[number % 2]
        directory.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    path = [str(elsewhere), str(checkout()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return Almanac(root, {"PYTHONPATH": os.pathsep.join(path)}, beside)


@pytest.fixture(scope="module")
def config() -> RecipeConfig:
    return compose([*SIZES, *of_the_command(), *of_the_resources()])


@pytest.fixture(scope="module")
def ran(almanac: Almanac) -> Path:
    """Directory of the run."""
    done = almanac("run", *SIZES, *of_the_command(), *of_the_resources())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (found,) = (almanac.root / ".work" / "runs").iterdir()
    return found


def kept(ran: Path, operator: str, step: int) -> list[Kept]:
    """A call of the stage as it was kept, by rank."""
    files = sorted((ran / "calls" / "rl" / f"step_{step:06d}").glob(f"*.{operator}.*.pickle"))
    return [pickle.loads(file.read_bytes()) for file in files]


def samples(ran: Path) -> dict[int, list[dict[str, Any]]]:
    """Rows of the RL stage, by step."""
    return {event.step: event.rows for event in read_events(ran / "events.jsonl") if isinstance(event, SamplesGenerated) and event.stage == "rl"}


def namespace(name: str) -> dict[str, Any]:
    """What a file of the page defines."""
    defined: dict[str, Any] = {}
    exec(FILES[name], defined)
    return defined


def test_the_page_has_five_files_and_a_line_for_each() -> None:
    assert list(FILES) == ["my_estimator.py", "my_loss.py", "my_reward.py", "my_annotator.py", "my_rollout.py"]
    assert [line.count("\n") for line in LINES] == [1] * 5
    for name, line in zip(FILES, LINES, strict=True):
        assert f"{name.removesuffix('.py')}:" in line
    # Mutation: a line of YAML that says something else than the command.
    lines = [override for line in LINES for override in overrides(yaml.safe_load(line))]
    assert compose([*SMALL, *lines]) == compose([*SMALL, *of_the_command()])


def test_preflight_knows_the_files(almanac: Almanac, config: RecipeConfig) -> None:
    # Mutations: leave out the directory that the command is called from, or a key of `tasks.preflight._names`.
    done = almanac("preflight", *SIZES, *of_the_command(), *of_the_resources())
    assert (done.returncode, done.stderr) == (0, "")
    misspelt = [override.replace("my_", "my_own_") for override in of_the_command()]
    done = almanac("preflight", *SIZES, *misspelt)
    assert done.returncode == 2
    for line in LINES:
        (key,) = (override.partition("=")[0] for override in overrides(yaml.safe_load(line)) if ":" in override)
        assert f"{key}: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_reward_and_the_annotator_made_the_scores(ran: Path) -> None:
    # Mutations: evaluate's exact_match instead; leave the weight out; workers that do not find the files.
    score = namespace("my_reward.py")["right_or_boxed"]
    seen = set()
    for rows in samples(ran).values():
        for row in rows:
            of_form = score(row["response"], row["ground_truth"])
            seen.add(of_form)
            assert row["reward"] == pytest.approx(of_form + WEIGHT * (1 - row["response_tokens"] / LIMIT_TOKENS), abs=1e-6)
    assert len(seen) > 1


def test_the_annotator_is_a_role_of_its_own(ran: Path) -> None:
    trace = json.loads((ran / "traces" / "rl" / "step_000001.json").read_text())
    (operation,) = (operation for operation in trace["operations"] if operation["role"] == "brevity")
    assert (operation["operator"], operation["pool"]) == ("annotations", "judges")
    for event in read_events(ran / "events.jsonl"):
        if isinstance(event, StepFinished) and event.stage == "rl":
            lengths = [row["response_tokens"] for row in samples(ran)[event.step]]
            mean = sum(1 - length / LIMIT_TOKENS for length in lengths) / len(lengths)
            assert event.metrics["reward/brevity_mean"] == pytest.approx(mean, abs=1e-6)


def test_the_advantages_leave_one_out(ran: Path) -> None:
    for step in (1, 2):
        (call,) = kept(ran, "actor.advantage", step)
        scored, *_ = call.arguments
        rewards, prompts, mask = (scored.tensors[name] for name in ("reward", "prompt", "response_mask"))
        for row in range(len(rewards)):
            others = [float(rewards[other]) for other in range(len(rewards)) if other != row and prompts[other] == prompts[row]]
            assert len(others) == 3
            expected = float(rewards[row]) - sum(others) / 3
            assert torch.allclose(call.result.tensors["advantages"][row][mask[row]], torch.tensor(expected), atol=1e-6)


def test_the_loss_told_its_own_statistic_and_made_the_update(ran: Path) -> None:
    metrics = [event.metrics for event in read_events(ran / "events.jsonl") if isinstance(event, StepFinished) and event.stage == "rl"]
    for step, found in enumerate(metrics, start=1):
        tokens = [part.arguments[0].tensors for part in kept(ran, "actor.update", step)]
        log_probs = torch.cat([part["old_log_probs"][part["response_mask"]] for part in tokens])
        # One update a step: the policy is still the one that the step began with.
        assert found["policy/surprise"] == pytest.approx(-float(log_probs.mean()), abs=1e-4)
        assert found["policy/gradient_norm"] > 0
        assert "policy/clip_fraction_low" not in found
    assert len(metrics) == 2


def test_the_first_sample_of_each_prompt_is_the_greedy_one(ran: Path, config: RecipeConfig) -> None:
    """As plain `transformers` decodes it, from the weights that the stage began with."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = next(stage["model"] for stage in json.loads((ran / "record.json").read_text())["stages"] if stage["name"] == "sft")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), AutoTokenizer.from_pretrained(directory)
    rows = samples(ran)[1]
    assert len(rows) == 16
    drawn = []
    for row in rows:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        tokens = model.generate(**prompt, do_sample=False, max_new_tokens=config.rl_stages()[0].max_response_tokens)[0]
        greedy = tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        if row["sample_id"].endswith("/0"):
            assert row["response"] == greedy
        else:
            drawn.append(row["response"] == greedy)
    # Mutation: everything greedy.
    assert not all(drawn)


def test_an_evaluation_scores_as_before(ran: Path, config: RecipeConfig) -> None:
    assert config.evaluation_reward == RewardConfig(by_data_source={"chain_sum": "exact_match"})
    record = json.loads((ran / "record.json").read_text())
    assert record["status"] == "finished"
    assert record["stages"][1]["steps"] == 2


def test_a_module_beside_the_caller_is_found_by_the_installed_command(almanac: Almanac) -> None:
    """`-P` leaves the working directory off the path, as an installed script does. Mutation: take it out of `flows.cli.main`."""
    (almanac.directory / "beside.py").write_text("def score(response, ground_truth): return 1.0")
    command = almanac.command("preflight", *SMALL, "stages.rl.reward.default=beside:score")
    done = subprocess.run(
        [command[0], "-P", *command[1:]], cwd=almanac.directory, env=almanac.environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")

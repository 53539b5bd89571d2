"""`almanac reshard-plan` up to vLLM, which is asked in tests/engine/test_reshard_layout.py."""

import json
from pathlib import Path
from unittest import mock

import pytest

from engine.reshard.build import Colocated
from engine.reshard.layout import Cut, Layout, Part, Sharding, Tensor, contained_mesh, cut, plain_mesh, training_layout
from engine.reshard.plan import make_plan
from flows import cli


@pytest.fixture
def planned() -> Colocated:
    """Four ranks, engines of two, one matrix of 16 x 8 in bfloat16: M = 256, M/t - M/N = 64; a full float32 gather brings 3/4 of 512."""
    tensors = {"t": Tensor((16, 8), "bfloat16")}
    parts = {"t": Part("t", tensors["t"].whole)}
    rollout = Layout(tensors, {rank: {"t": (cut(tensors["t"].whole, [Cut(0, 2, rank % 2)]),)} for rank in range(4)})
    best, plain = (Sharding(mesh, {}, {}) for mesh in (contained_mesh(4, 4, 2), plain_mesh(4, 4)))
    plans = [make_plan(training_layout(tensors, parts, tensors, sharding), rollout, 1000) for sharding in (best, plain)]
    return Colocated(*plans, best, 128)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tiny_qwen3", "--fsdp", "8", "--tp", "3"], "--tp 3 does not divide --fsdp 8"),
        (["tiny_qwen3", "--fsdp", "0", "--tp", "1"], "--fsdp 0: must be more than 0"),
        (["tiny_qwen3", "--fsdp", "2", "--tp", "1", "--bucket-megabytes", "nan"], "--bucket-megabytes nan"),
        (["no_such", "--fsdp", "2", "--tp", "1"], "Qwen/Qwen3-235B-A22B, "),
    ],
)
def test_bad_input_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reshard-plan", *arguments]) == cli.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_json_says_all(planned: Colocated, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation: `--json` printing after the table, or a library's line on the same stream, is no JSON."""
    with mock.patch("engine.reshard.build.colocated", return_value=planned) as asked:
        assert cli.main(["reshard-plan", "qwen3_4b", "--fsdp", "4", "--tp", "2", "--json", "--bucket-megabytes", "0.5"]) == 0
    assert asked.call_args.args[2:] == (4, 2, 500_000)
    assert asked.call_args.args[0].hidden_size == 2560
    found = json.loads(capsys.readouterr().out)
    assert found["shard_of_rank"] == [0, 2, 1, 3]
    assert [ranks["received"] for ranks in found["plan"]["ranks"].values()] == [64] * 4
    assert [ranks["received"] for ranks in found["fsdp_order"]["ranks"].values()] == [64, 128, 128, 64]
    assert {ranks["full_gather"] for ranks in found["plan"]["ranks"].values()} == {384}


@pytest.mark.parametrize(("name", "hidden"), [("qwen3_1_7b", 2048), ("Qwen/Qwen3-32B", 5120), ("qwen2_5_0_5b_instruct", 896)])
def test_a_published_model_is_planned_for_without_a_network(name: str, hidden: int, planned: Colocated) -> None:
    # Mutation: know the names of conf/model only by asking the hub.
    with mock.patch("engine.reshard.build.colocated", return_value=planned) as asked:
        assert cli.main(["reshard-plan", name, "--fsdp", "4", "--tp", "2"]) == 0
    assert asked.call_args.args[0].hidden_size == hidden


def test_the_table_says_what_and_who_follows_it(planned: Colocated, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("engine.reshard.build.colocated", return_value=planned):
        assert cli.main(["reshard-plan", "tiny_qwen3", "--fsdp", "4", "--tp", "2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1-2", "128", "B", "64", "B", "64", "B", "64", "B", "1.000", "128", "B", "384", "B"] in lines
    assert any("follows this plan" in " ".join(line) for line in lines)


def test_a_directory_is_a_model(planned: Colocated, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 96}), encoding="utf-8")
    with mock.patch("engine.reshard.build.colocated", return_value=planned) as asked:
        assert cli.main(["reshard-plan", str(tmp_path), "--fsdp", "4", "--tp", "2"]) == 0
    assert asked.call_args.args[0].hidden_size == 96

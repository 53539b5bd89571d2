"""The same recipe on a Ray cluster of two nodes that was there before: one group over both, and groups divided by node."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_recipe import SMALL, Almanac

OBJECT_STORE_BYTES = 100 * 2**20
SMALLER = ["stages.sft.steps=20", "data.chain_sum.test_rows=8", "stages.rl.steps=1"]


CLUSTER = f"""
import sys
from ray.cluster_utils import Cluster

node = {{"object_store_memory": {OBJECT_STORE_BYTES}, "num_cpus": 2}}
cluster = Cluster(initialize_head=True, head_node_args={{**node, "resources": {{"first": 8}}, "include_dashboard": False}})
cluster.add_node(**node, resources={{"second": 8}})
cluster.wait_for_nodes()
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two nodes on this machine, of two CPUs each; a group of three ranks needs both.

    In a process of its own, without Ray's variables: one that had another cluster before has been told by Ray to ask for tokens, which a driver
    without that variable has not.
    """
    environment = Almanac(tmp_path_factory.mktemp("cluster")).environment()
    process = subprocess.Popen([sys.executable, "-c", CLUSTER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield next(line.split()[1] for line in process.stdout if line.startswith("address "))
    finally:
        process.stdin.close()
        process.wait(60)


def nodes(root: Path) -> dict[str, set[str]]:
    """Nodes that each role ran on, from the trace of the newest run."""
    (file,) = root.glob(".work/runs/*/traces/rl/step_000001.json")
    found: dict[str, set[str]] = {}
    for operation in json.loads(file.read_text())["operations"]:
        found.setdefault(operation["role"], set()).update(span["node"] for span in operation["spans"])
    return found


def run(root: Path, address: str, *overrides: str) -> dict[str, set[str]]:
    almanac = Almanac(root, {"RAY_ADDRESS": address})
    ended = almanac("run", *SMALL, *SMALLER, *overrides)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return nodes(root)


def test_one_group_over_both_nodes(address: str, tmp_path: Path) -> None:
    # Mutation: placement groups with STRICT_PACK.
    three = ["resources.ranks=3", "stages.sft.rows_per_step=24", "stages.rl.prompts_per_step=6"]
    assert len(run(tmp_path, address, *three)["actor"]) == 2


def test_groups_divided_by_node(address: str, tmp_path: Path) -> None:
    # Mutation: leave ray_resources_per_rank out of a bundle.
    overrides = [
        "algorithm@stages.rl.algorithm=ppo",
        "resources.cpus_per_rank=0.5",
        "resources.ray_resources_per_rank={first: 1.0}",
        "resources.pools={others: {ranks: 1, device: cpu, cpus_per_rank: 0.5, ray_resources_per_rank: {second: 1.0}}}",
        "resources.roles={critic: others, reward: others}",
    ]
    found = run(tmp_path, address, *overrides)
    assert len(found["actor"]) == 1
    assert found["critic"] == found["reward"] != found["actor"]


def test_a_cluster_that_nobody_named_is_left_alone(address: str, tmp_path: Path) -> None:
    # Mutation: leave it to Ray, which joins the cluster that was started last on this machine, and refuses what only a new one is told.
    ended = Almanac(tmp_path)("run", *SMALL, *SMALLER, "~stages.rl")
    assert ended.returncode == 0, ended.stderr[-3000:]

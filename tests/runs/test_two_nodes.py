"""Two Ray nodes, simulated on this machine: the recipe trains, each engine on one node."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.runs import SMALL, started

LAYOUT = ["cluster.nodes=2", "cluster.gpus_per_node=2", "rollout.tensor_parallel_size=2"]


@pytest.fixture
def address(tmp_path):
    """RAY_ADDRESS of a cluster of two nodes."""
    cluster = subprocess.Popen(
        [sys.executable, "-m", "tests.support.two_nodes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
    )
    assert cluster.stdin is not None and cluster.stdout is not None
    try:
        yield cluster.stdout.readline().strip()
    finally:
        cluster.stdin.close()
        cluster.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [SMALL, ["+recipe=calculator_agent", *SMALL[1:]]], ids=["batch", "agents"]
)
def test_trains_with_each_engine_on_one_node(tmp_path, address, recipe):
    assert re.fullmatch(r"[\d.]+:\d+", address)
    env = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    with started(tmp_path / "run", *recipe, *LAYOUT, env=env) as run:
        output = run.output()
        assert run.process.returncode == 0, output
        for row in run.metrics()[1:]:
            assert row["actor/first_log_ratio_max"] == 0.0
            assert row["rollout/log_prob_diff_mean"] < 1e-4
        nodes = [re.search(r"rank (\d) on .*node (\w+)\)", line) for line in output.splitlines()]
        node_of = {int(m[1]): m[2] for m in nodes if m}
        assert node_of[0] == node_of[1] != node_of[2] == node_of[3]


@pytest.mark.slow
def test_nodes_of_unequal_size_train_together(tmp_path, address):
    env = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    batch = ["data.prompts_per_step=9", "actor.mini_batch_size=18"]
    uneven = ["cluster.nodes=2", "placement.slots_on_nodes=[2,1]"]
    with started(tmp_path / "run", *SMALL, *batch, *uneven, env=env) as run:
        output = run.output()
        assert run.process.returncode == 0, output
        nodes = re.findall(r"rank \d on .*node (\w+)\), slot (\d)", output)
        assert sorted(slot for _, slot in nodes) == ["0", "0", "1"]
        assert len({node for node, _ in nodes}) == 2
        assert all(row["actor/first_log_ratio_max"] == 0.0 for row in run.metrics()[1:])
        assert all(row["rollout/straddling_engines"] == 0 for row in run.metrics()[1:])


@pytest.mark.slow
def test_an_engine_may_straddle_where_that_is_allowed_and_the_metrics_say_so(tmp_path, address):
    env = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    engine = ["cluster.nodes=2", "cluster.gpus_per_node=1", "rollout.tensor_parallel_size=2"]
    allowed = "placement.allow_straddle=true"
    with started(tmp_path / "run", *SMALL, *engine, allowed, env=env) as run:
        output = run.output()
        assert run.process.returncode == 0, output
        assert "rollout engine 0 straddles nodes" in output
        assert "placement.engines on all" in output
        assert all(row["rollout/straddling_engines"] == 1 for row in run.metrics()[1:])


@pytest.mark.slow
def test_a_checkpoint_is_verified_on_both_nodes_before_it_is_taken_up(tmp_path, address):
    env = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    for steps in (2, 3):
        given = (*SMALL, *LAYOUT, "resume=auto", f"trainer.total_steps={steps}")
        with started(tmp_path / "run", *given, env=env) as run:
            output = run.output()
            assert run.process.returncode == 0, output
    read, there = re.search(r"(\d+) of (\d+) files read by 2 nodes", output).groups()
    assert read == there != "0"
    assert [row["step"] for row in run.metrics()] == [0, 1, 2, 3]

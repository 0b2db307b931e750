"""Two hosts, network namespaces in different subnets: Ray's head on one, a worker on the other.

A training step over both, the doctor over Ray, and what it says of another token and a lost node.
"""

import json
import secrets
import subprocess
import sys
import time

import pytest

from hybridrl.checkpoint.verification import newest_good
from hybridrl.controller.ray.node_probes import LocalProbes
from hybridrl.doctor import ray as ray_services
from hybridrl.doctor.findings import Verdict
from tests.support import over_ray
from tests.support.namespace_agents import only
from tests.support.namespaces import bench, need_namespaces, write_hosts
from tests.support.runs import SMALL

STEP = ["trainer.total_steps=500", "data.prompts_per_step=4", "data.num_eval_problems=2"]
LAYOUT = ["cluster.nodes=2", "cluster.gpus_per_node=1"]


@pytest.fixture(scope="module")
def hosts():
    need_namespaces()
    with bench("10.78.1.2/24", "10.78.2.2/24") as made:
        # As Debian writes it: a host takes its own name for an address that leads nowhere else.
        write_hosts(made[1], f"127.0.0.1 localhost\n127.0.1.1 {made[1].name}\n")
        yield made


@pytest.fixture(scope="module")
def cluster(hosts, tmp_path_factory):
    """The environment in which programs join a cluster of both hosts."""
    head, other = hosts
    folder = tmp_path_factory.mktemp("ray")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    address = f"{head.address}:6379"
    place = ["--head", "--port=6379", f"--node-ip-address={head.address}"]
    head.start_ray(folder / "head.log", *place, "--include-dashboard=false", **token)
    place = [f"--address={address}", f"--node-ip-address={other.address}"]
    other.start_ray(folder / "other.log", *place, **token)
    return token | {"RAY_ADDRESS": address}


def test_a_training_step_over_two_hosts_and_sigterm_saves_it(hosts, cluster, tmp_path):
    folder = tmp_path / "run"
    metrics = folder / "metrics.jsonl"
    process = hosts[0].start(
        *(sys.executable, "-m", "hybridrl.main", *SMALL, *STEP, *LAYOUT),
        f"hydra.run.dir={folder}",
        env=cluster,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    end = time.monotonic() + 240.0
    while not (metrics.is_file() and metrics.read_bytes().count(b"\n") > 1):
        assert process.poll() is None and time.monotonic() < end, process.communicate(timeout=60)[0]
        time.sleep(0.1)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "; resume from " in output
    for rank, host in enumerate(hosts):
        assert f"rank {rank} on {host.name} ({host.address}, node" in output
        assert (folder / "logs" / f"{host.name}_rank{rank}.log").stat().st_size > 0
    assert len(list((folder / "logs").glob("*_rank*.log"))) == len(hosts)
    row = json.loads(metrics.read_text().splitlines()[-1])
    assert newest_good(folder).manifest.step == row["step"]
    assert row["actor/first_log_ratio_max"] == 0.0
    assert row["rollout/log_prob_diff_mean"] < 1e-4


@pytest.fixture(scope="module")
def told(hosts, cluster):
    """What the doctor is told over Ray."""
    return hosts[0].call(over_ray.everything, 2, env=cluster | {"NCCL_OF_CALLER": "4 2"})


def test_the_doctor_reaches_every_node_over_ray(hosts, told):
    assert told.nodes == [host.name for host in hosts]
    assert told.addresses == {host.name: host.address for host in hosts}


def test_what_the_caller_sets_for_libraries_reaches_every_node(told):
    assert [answer.value for answer in told.variable.values()] == ["4 2"] * 2


def test_rooms_are_what_ray_may_hand_out(hosts, told):
    """Each node was given a CPU and no GPU."""
    names = [host.name for host in hosts]
    assert told.rooms == [dict.fromkeys(names, 1), dict.fromkeys(names, 0)]


def test_a_node_is_one_process_for_all_calls(told):
    first, second = told.processes
    assert first == second
    assert len({answer.value for answer in first.values()}) == 2


def test_a_failure_on_a_node_is_an_answer(hosts, told):
    raising, late, unsendable = told.failing
    for answers, says in ((raising, "ValueError"), (late, "within 0.5 s"), (unsendable, "pickle")):
        assert list(answers) == [host.name for host in hosts]
        assert all(says in answer.error for answer in answers.values()), answers


def test_a_sound_cluster_has_no_failure(hosts, told):
    assert [found for found in told.findings if found.verdict is Verdict.fail] == []
    address = f"{hosts[0].address}:6379"
    assert f"2 node(s) connect to {address}" in only(told.findings, "ray.reachable").evidence
    assert "2 of cluster.nodes=2 alive" in only(told.findings, "ray.nodes").evidence
    assert only(told.findings, "ray.port").evidence.endswith(address)
    assert only(told.findings, "ray.token").evidence.startswith("token with SHA-256")


@pytest.mark.parametrize(
    "given",
    [
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64},
    ],
    ids=["no token", "another token"],
)
def test_a_missing_or_other_token_is_named(hosts, cluster, given):
    environment = {"RAY_ADDRESS": cluster["RAY_ADDRESS"], "RAY_AUTH_TOKEN": "", **given}
    agents = LocalProbes(hosts[1].name)
    findings = hosts[1].call(ray_services.examine, agents, 2, env=environment)
    refused = [f for f in findings if f.check == "ray.token" and f.verdict is Verdict.fail]
    assert len(refused) == 1 and "refuses this node" in refused[0].evidence
    assert "RAY_AUTH_MODE=token RAY_AUTH_TOKEN=" in refused[0].advice
    assert only(findings, "ray.nodes").verdict is Verdict.skipped


def test_a_lost_node_is_an_answer_and_a_finding(hosts, cluster):
    head, other = hosts
    (before, after), seconds, findings = head.call(over_ray.lose, other, 2, env=cluster)
    assert not any(answer.error for answer in before.values())
    assert not after[head.name].error and after[other.name].error
    assert seconds < 6.0
    found = only(findings, "ray.nodes")
    assert found.verdict is Verdict.fail
    assert "1 of cluster.nodes=2 alive" in found.evidence
    assert f"dead: {other.name} ({other.address})" in found.evidence
    assert "ray start --address=" in found.advice

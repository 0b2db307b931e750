"""deploy/ssh with a real Ray: two network namespaces of this machine play the hosts."""

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deploy_stubs import REPO
from tests.support.namespaces import ip, need_namespaces

pytestmark = pytest.mark.full

HOSTS = ("10.83.61.1", "10.83.61.2")
# What the command sees: each node's address, and the interface that its workers are to use.
LOOK = """
import os, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
@ray.remote(num_cpus=0)
def where():
    return ray.util.get_node_ip_address(), os.environ["NCCL_SOCKET_IFNAME"]
ray.init(log_to_driver=False)
nodes = [node for node in ray.nodes() if node["Alive"]]
print("nodes", sorted(node["NodeManagerAddress"] for node in nodes))
there = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
print("workers", sorted(ray.get([where.options(scheduling_strategy=s).remote() for s in there])))
print("driver", os.environ.get("NCCL_SOCKET_IFNAME"))
raise SystemExit(5)
"""
SSH = """#!/bin/bash
while [ "$1" = -o ]; do shift 2; done
exec ip netns exec {name}${{1##*.}} env -i PATH=/usr/bin:/bin bash -c "$2"
"""


@pytest.fixture
def hosts() -> Iterator[str]:
    """Two namespaces on one cable whose ends have unlike names; what their own names begin with."""
    need_namespaces()
    name = f"hr{uuid.uuid4().hex[:6]}n"
    try:
        for number in ("1", "2"):
            ip("netns", "add", name + number)
            ip("-n", name + number, "link", "set", "lo", "up")
        ip(*f"link add ib1 netns {name}1 type veth peer ib2 netns {name}2".split())
        for number, address in zip(("1", "2"), HOSTS, strict=True):
            ip("-n", name + number, "addr", "add", f"{address}/24", "dev", f"ib{number}")
            ip("-n", name + number, "link", "set", f"ib{number}", "up")
        yield name
    finally:
        for number in ("1", "2"):
            subprocess.run(["ip", "netns", "del", name + number], check=False, capture_output=True)


@pytest.mark.slow
def test_ray_spans_two_hosts_and_each_uses_its_own_interface(tmp_path, hosts):
    (tmp_path / "ssh").write_text(SSH.format(name=hosts))
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("\n".join(HOSTS) + "\n")
    (tmp_path / "deploy").symlink_to(REPO / "deploy")
    path = f"{tmp_path}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/bin"
    environment = {"PATH": path, "HOME": str(tmp_path), "HYBRIDRL_START_S": "120"}
    environment |= {"RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION": "0.01"}
    call = ["bash", "deploy/ssh/train.sh", "hosts", "--", "python", "-c", LOOK]
    done = subprocess.run(
        call, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 5, done.stdout + done.stderr
    assert f"nodes {sorted(HOSTS)}" in done.stdout
    assert f"workers [('{HOSTS[0]}', '=ib1'), ('{HOSTS[1]}', '=ib2')]" in done.stdout
    assert "driver None" in done.stdout
    left = subprocess.run(["ip", "netns", "pids", f"{hosts}1"], capture_output=True, text=True)
    assert left.stdout == ""

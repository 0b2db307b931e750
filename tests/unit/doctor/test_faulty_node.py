"""Two nodes, one of them with every fault that a process of this machine can be given."""

import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from huggingface_hub import constants

from hybridrl.config.planner.model_shape import model_shape
from hybridrl.doctor import inputs, room
from hybridrl.doctor.findings import Verdict
from hybridrl.doctor.host import stage as host
from hybridrl.doctor.inputs import check_run_directory
from hybridrl.doctor.joined import joined_probes
from hybridrl.doctor.models import judge_model, model_facts
from hybridrl.doctor.stages import gather
from hybridrl.models.resolve import read_model_config
from tests.support.host_cases import (
    HUB_MODEL,
    assert_finds,
    case,
    cgroup,
    hub_cache,
    need_mounts,
    of,
)
from tests.support.run_configs import run_config

pytestmark = pytest.mark.full

SERVE = "import sys; from hybridrl.doctor.joined import serve; serve(sys.argv[1], 30)"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The second node's HF_HOME."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory, home):
    """This process and a node with a tiny /dev/shm, little memory, and other values.

    Those are of Ray's version, NCCL_ALGO and HF_HOME.
    """
    need_mounts()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    other = tmp_path_factory.mktemp("site") / "ray-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 1.0\n")
    with cgroup("memory", memory__limit_in_bytes=str(2**30)) as join:
        faults = f"{join}; mount -t tmpfs -o size=64m tmpfs /dev/shm"
        command = ["unshare", "-m", "sh", "-ec", f'{faults}; exec "$0" "$@"', sys.executable]
        environment = {"NCCL_ALGO": "Tree", "PYTHONPATH": str(other.parent)}
        environment |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
        environment["HYBRIDRL_DOCTOR_KEY"] = key = "k" * 64
        node = subprocess.Popen([*command, "-c", SERVE, address], env=os.environ | environment)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("NCCL_ALGO", "Ring")
                patch.setenv("HYBRIDRL_DOCTOR_KEY", key)
                with joined_probes(address, 2, timeout_s=30) as agents:
                    yield agents
            assert node.wait(10) == 0
        finally:
            node.kill()
            node.wait()


@pytest.fixture(scope="module")
def found(nodes):
    return host.check(case(agents=nodes))


def second(findings, check, nodes):
    """The one finding of a check about the second node."""
    (finding,) = [f for f in of(findings, check) if f.node == nodes.nodes[1]]
    return finding


def test_the_first_node_is_not_blamed(found, nodes):
    failed = {f.check for f in found if f.node == nodes.nodes[0] and f.verdict is Verdict.fail}
    assert not failed & {"host.shm", "host.versions", "host.communication_variables"}


def test_its_tiny_shared_memory_is_named(found, nodes):
    finding = second(found, "host.shm", nodes)
    assert_finds(finding, "host.shm", Verdict.fail, "64 MiB free of 64 MiB", "--shm-size")


def test_its_other_version_of_ray_is_named(found, nodes):
    finding = second(found, "host.versions", nodes)
    assert_finds(
        finding, "host.versions", Verdict.fail, "ray 1.0 here, ray 2.", "pip install ray==2."
    )


def test_its_other_nccl_variable_is_named(found, nodes):
    finding = second(found, "host.communication_variables", nodes)
    assert_finds(
        finding,
        "host.communication_variables",
        Verdict.fail,
        "NCCL_ALGO=Tree here, NCCL_ALGO=Ring on",
        "Set NCCL_ALGO",
    )


def test_its_clock_is_that_of_the_first(found):
    (finding,) = of(found, "host.clock")
    assert finding.verdict is Verdict.ok and finding.evidence.startswith("2 clocks")


def test_its_cgroup_is_too_small_for_the_run(nodes):
    finding = second(room.check_memory(case(agents=nodes)), "memory.host", nodes)
    assert_finds(
        finding, "memory.host", Verdict.fail, "of the 1.0 GiB that /sys/fs/cgroup/memory", "--mem=0"
    )


def test_its_other_cache_is_named_with_what_differs_there(nodes, home, tmp_path, monkeypatch):
    """Both nodes have the model, each in a cache of its own, and one file is another."""
    hub_cache(tmp_path)
    (hub_cache(home) / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))  # as HF_HOME, read once
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    config = run_config()
    config.model.path = HUB_MODEL
    shape = model_shape(read_model_config("embedded"))
    findings = inputs.check(replace(case(config=config, agents=nodes), shape=shape))
    differing = second(findings, "inputs.cache_contents", nodes)
    evidence = f"differs from {nodes.nodes[0]}'s: tokenizer.json has 2 bytes here"
    advice = f"hf download {HUB_MODEL} on that node, or one HF_HOME"
    assert_finds(differing, "inputs.cache_contents", Verdict.fail, evidence, advice)
    evidence = f"{home}/hub (owner"
    *_, elsewhere = [f for f in of(findings, "inputs.cache") if f.node == nodes.nodes[1]]
    assert_finds(elsewhere, "inputs.cache", Verdict.warn, evidence, "export HF_HOME=")
    assert f"the driver uses {tmp_path}/hub" in elsewhere.evidence
    failed = {(f.check, f.node) for f in findings if f.verdict is Verdict.fail}
    assert failed == {("inputs.cache_contents", nodes.nodes[1])}


def test_it_has_the_same_model_cache_and_folder(nodes, tmp_path):
    caches = inputs.check(case(agents=nodes, quick=True))
    models = judge_model(
        "embedded", gather(nodes, "inputs.model", model_facts, "embedded", True)[0]
    )
    for of_each in (caches, [*models]):
        assert {(f.node, f.verdict) for f in of_each} == {(n, Verdict.ok) for n in nodes.nodes}
    (shared,) = check_run_directory(nodes, str(tmp_path))
    assert "shared by all nodes" in shared.evidence

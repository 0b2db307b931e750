"""How many ranks nodes may get, and what stages make of unequal nodes, all of them invented."""

import dataclasses
import socket
import time

import pytest

from hybridrl.config.choices import Accelerator
from hybridrl.config.planner.machine import GPU, Machine, Node, local_machine
from hybridrl.config.planner.memory import host_parts, on_node
from hybridrl.controller.ray.node_probes import ProbeResult, Resources
from hybridrl.doctor import room
from hybridrl.doctor.findings import Verdict
from hybridrl.doctor.host import stage as host
from hybridrl.doctor.host.facts import Limit, host_facts
from hybridrl.doctor.host.gpus import GPUFacts, Smi, gpu_facts
from hybridrl.doctor.room import host_memory
from hybridrl.doctor.stages import max_ranks, ranks_that_fit
from tests.support.host_cases import GIB, case, facts, of
from tests.support.run_configs import run_config

pytestmark = pytest.mark.full

H200 = Smi("", "NVIDIA H200", "570.1", 143771, 143000, 0, False)


class Nodes:
    """Nodes with so many GPUs, and bytes of memory left.

    Args:
        gpus: by node.
        left: by node.
        environment: of the first one's processes.
    """

    def __init__(self, gpus, left, environment=None):
        self.nodes = list(gpus)
        self.addresses = {node: f"10.0.0.{k}" for k, node in enumerate(gpus)}
        self._gpus = gpus
        self._left = left
        self._environment = {self.nodes[0]: environment or {}}

    resources = None

    def call_each(self, function, arguments, timeout_s):
        del timeout_s
        return {node: ProbeResult(self._answer(node, function)) for node in arguments}

    def _answer(self, node, function):
        gpus = [H200._replace(uuid=f"GPU-{node}{k}") for k in range(self._gpus[node])]
        uuids = tuple(gpu.uuid for gpu in gpus)
        if function is local_machine:
            cards = tuple(GPU(gpu.name, gpu.total_mib * 2**20) for gpu in gpus)
            return Machine((Node(socket.gethostname(), 64, 1024 * GIB, cards),))
        return {
            host_facts: facts(environment=self._environment.get(node, {})),
            gpu_facts: GPUFacts(gpus, seen=uuids),
            host_memory: Limit("the machine", self._left[node], 0),
            time.time: time.time(),
        }[function]


def uneven_case(gpus, left, slots):
    """A run with so many ranks on its nodes."""
    config = run_config()
    config.hardware.accelerator = Accelerator.gpu
    config.cluster.nodes, config.cluster.gpus_per_node = len(slots), max(slots)
    config.placement.slots_on_nodes = slots
    config.fsdp.dp_shard = sum(slots)
    return case(config=config, agents=Nodes(gpus, left))


@pytest.fixture(scope="module")
def uneven():
    """Ranks for 8 and 2 GPUs of nodes that have 8 and 3, the small one with memory for no more."""
    wide = uneven_case({"big": 8, "small": 3}, {}, [8, 2])
    rank = sum(host_parts(wide.config, wide.shape).values())
    left = {"big": int(1.3 * on_node(8, rank)), "small": int(1.3 * on_node(2, rank))}
    assert left["small"] < on_node(8, rank)
    return dataclasses.replace(wide, agents=Nodes({"big": 8, "small": 3}, left))


def test_a_node_with_fewer_ranks_needs_their_gpus_alone(uneven):
    found = of(host.check(uneven), "host.gpus")
    assert {f.node: f.verdict for f in found} == {"big": Verdict.ok, "small": Verdict.ok}


def test_a_node_with_fewer_ranks_needs_their_memory_alone(uneven):
    found = room.check_memory(uneven)
    assert {f.verdict for f in found} == {Verdict.ok}
    evidence = {f.node: f.evidence for f in of(found, "memory.host")}
    assert "(8 x 4.0 GiB" in evidence["big"] and "(2 x 4.0 GiB" in evidence["small"]
    assert [f.node for f in of(found, "memory.gpu")] == ["big"] * 8 + ["small"] * 2


def test_a_head_without_gpus_is_held_to_nothing_that_ranks_need(uneven):
    left = {"head": 2 * GIB, "big": 1024 * GIB, "small": 1024 * GIB}
    nodes = Nodes({"head": 0, "big": 8, "small": 3}, left, {"NCCL_ALGO": "Tree"})
    with_head = dataclasses.replace(uneven, agents=nodes)
    assert with_head.slots == {"head": 0, "big": 8, "small": 2}
    found = host.check(with_head) + room.check_memory(with_head)
    assert {f.verdict for f in found} == {Verdict.ok, Verdict.skipped}
    evidence = {f.check: f.evidence for f in found if f.node == "head"}
    assert evidence["host.gpus"] == "no rank of the run is placed here"
    assert "needs 1.5 GiB of RAM here (0 x" in evidence["memory.host"]


def test_a_node_that_lacks_gpus_for_its_own_ranks_fails():
    lacking = uneven_case({"big": 8, "small": 1}, dict.fromkeys(("big", "small"), GIB), [8, 2])
    found = {f.node: f for f in of(host.check(lacking), "host.gpus")}
    assert found["big"].verdict is Verdict.ok and found["small"].verdict is Verdict.fail
    assert "a process sees 1 GPUs" in found["small"].evidence
    assert "the run wants 2 here" in found["small"].evidence


@pytest.mark.parametrize(
    ("wanted", "there", "expected"),
    [
        ([8, 2], {"a": 8, "b": 2}, {"a": 8, "b": 2}),
        ([8, 2], {"b": 2, "a": 8, "c": 2}, {"a": 8, "b": 2, "c": 2}),
        ([8, 2], {"a": 8, "b": 8}, {"a": 8, "b": 8}),
        ([8, 8], {"a": 8, "b": 8, "head": 0}, {"a": 8, "b": 8, "head": 0}),
        ([8, 8], {"head": 0, "a": 8}, {"a": 8, "head": 8}),
        ([4], {"a": 0, "b": 0}, {"a": 4, "b": 0}),
    ],
)
def test_nodes_max_ranks_what_leaves_room_for_the_rest(wanted, there, expected):
    assert max_ranks(wanted, there) == expected


@pytest.mark.parametrize(
    ("cpus_and_gpus", "wanted", "on_gpu", "expected"),
    [
        ([(8, 0), (64, 8), (64, 3)], [8, 2], True, [0, 8, 2]),
        ([(0, 8), (64, 8)], [8], True, [0, 8]),
        ([(2, 0), (64, 0)], [4], False, [0, 4]),
        ([(2, 0), (64, 0)], [4, 4], False, [4, 4]),
    ],
    ids=["gpus", "no cores", "few cores", "shared cores"],
)
def test_room_on_nodes_of_ray_is_what_a_placement_group_asks_for(
    cpus_and_gpus, wanted, on_gpu, expected
):
    nodes = {f"n{k}": Resources(*has, *has) for k, has in enumerate(cpus_and_gpus)}
    assert list(ranks_that_fit(nodes, wanted, on_gpu=on_gpu).values()) == expected

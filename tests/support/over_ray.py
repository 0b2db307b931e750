"""What the tests of hosts ask of a Ray cluster, each in a process on its head's host."""

import os
import signal
import time
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

import psutil

from hybridrl.controller.ray.node_probes import ProbeResult, call_all
from hybridrl.controller.ray.ray_probes import RayProbes, ray_nodes
from hybridrl.doctor import ray as ray_services
from hybridrl.doctor.findings import Finding
from hybridrl.doctor.network import stage as network
from hybridrl.doctor.stages import ranks_that_fit
from tests.support.namespaces import Host, ip


class Told(NamedTuple):
    """What came of several calls.

    Attributes:
        nodes, addresses: of the agents.
        processes: the id of the process that answers on each node, asked twice.
        failing: answers of functions that raise, are late, or return what cannot travel.
        findings: of the stages network (quick) and ray.
        variable: of the caller's environment, on each node.
        rooms: for a rank on a CPU, and for one on a GPU.
    """

    nodes: list[str]
    addresses: dict[str, str]
    processes: list[dict[str, ProbeResult]]
    failing: list[dict[str, ProbeResult]]
    findings: list[Finding]
    variable: dict[str, ProbeResult]
    rooms: list[dict[str, int]]


def everything(wanted: int) -> Told:
    """Call the nodes of the cluster in several ways."""
    with RayProbes() as agents:
        return Told(
            agents.nodes,
            agents.addresses,
            [call_all(agents, os.getpid) for _ in range(2)],
            [
                call_all(agents, int, "x"),
                call_all(agents, time.sleep, 2.0, timeout_s=0.5),
                call_all(agents, Lock),
            ],
            network.examine(agents, [29500, 29599], on_gpu=False, quick=True)
            + ray_services.examine(agents, wanted),
            call_all(agents, os.getenv, "NCCL_OF_CALLER"),
            [ranks_that_fit(agents.resources, [1], on_gpu=on_gpu) for on_gpu in (False, True)],
        )


def lose(host: Host, wanted: int) -> tuple[list[dict[str, ProbeResult]], float, list[Finding]]:
    """End a host's Ray under the doctor.

    Returns:
        Answers before and after, the seconds that the last ones took, and the stage ray after.
    """
    with RayProbes() as agents:
        before = call_all(agents, os.getpid)
        for pid in map(int, ip("netns", "pids", host.namespace).split()):
            with suppress(psutil.NoSuchProcess):  # others end with the raylet
                if psutil.Process(pid).name() == "raylet":
                    os.kill(pid, signal.SIGTERM)  # it tells the head, or that takes 20 s to notice
        _wait_until_alone()
        host.kill_all()
        start = time.monotonic()
        after = call_all(agents, os.getpid, timeout_s=5.0)
        return [before, after], time.monotonic() - start, ray_services.examine(agents, wanted)


def _wait_until_alone() -> None:
    deadline = time.monotonic() + 40.0
    while sum(node.alive for node in ray_nodes()) != 1:
        assert time.monotonic() < deadline, "the head still counts the node"
        time.sleep(0.1)

"""Hardware of a cluster's nodes, reported by each node, and errors of nodes without a report."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, NodeDiedError, RayError, TaskUnschedulableError

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.machine import Machine, Node, local_machine
from hybridrl.controller.node_tasks import NodeTasks
from hybridrl.controller.ray.runtime import ALL_GPUS_VISIBLE, joined_cluster

# Seconds for the nodes to report their hardware; on one core, a process starts slowly.
REPORT_TIMEOUT_S = 60.0
# Kinds of missing reports, as texts about nodes.
FAILED = (
    "could not report their hardware:\n{}\n"
    "Install the same hybridrl and packages there, in the Python that started Ray, or remove these "
    "nodes from the cluster."
)
REFUSED = (
    "did not report their hardware: Ray accepted no task in time: {}.\n"
    "The head may be overloaded: see `ray status`, try again, or restart Ray."
)
SILENT = (
    "did not report their hardware in time: {}.\n"
    "See `ray status`; restart Ray there, or remove these nodes from the cluster."
)


def cluster_machine() -> Machine:
    """Return the hardware of the cluster at RAY_ADDRESS, limited to Ray's resources."""
    with joined_cluster(ALL_GPUS_VISIBLE):
        return machine_of([node for node in ray.nodes() if node["Alive"]])


def machine_of(nodes: Sequence[Mapping[str, Any]]) -> Machine:
    """Return the hardware of some nodes of `ray.nodes()`; ConfigError if one does not report it."""
    tasks, refs, found = NodeTasks(), {}, []
    missing: dict[str, list[str]] = {FAILED: [], REFUSED: [], SILENT: []}
    for node in nodes:
        try:
            refs[node["NodeID"]] = tasks.submit(node["NodeID"], local_machine, retries=3)
        except GetTimeoutError:
            missing[REFUSED].append(_named(node))
    if refs:
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=REPORT_TIMEOUT_S)
    for node in nodes:
        if node["NodeID"] not in refs:
            continue
        try:
            machine = ray.get(refs[node["NodeID"]], timeout=0)
            found.append(_granted(node["Resources"], machine.nodes[0]))
        except (GetTimeoutError, NodeDiedError, TaskUnschedulableError):
            missing[SILENT].append(_named(node))
        except RayError as error:
            # The last line is the message of the remote exception.
            reason = str(error).strip().rpartition("\n")[2].strip() or type(error).__name__
            missing[FAILED].append(f"{_named(node)}: {reason}")
    problems = []
    for text, names in missing.items():
        listed = ("\n" if text is FAILED else ", ").join(names)
        begin = f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {len(names)} of {len(nodes)} nodes"
        problems += [f"{begin} {text.format(listed)}"] if names else []
    if problems:
        raise ConfigError(*problems)
    return Machine(tuple(found))


def _named(node: Mapping[str, Any]) -> str:
    """Name a node of `ray.nodes()` in messages."""
    where = f"{node['NodeManagerAddress']}, node {node['NodeID'][:8]}"
    return f"{node['NodeManagerHostname']} ({where})"


def _granted(resources: Mapping[str, float], node: Node) -> Node:
    """Limit the hardware of a node to Ray's resources."""
    gpus = node.gpus[: int(resources.get("GPU", 0))]
    return replace(node, cores=int(resources.get("CPU", 0)), gpus=gpus)

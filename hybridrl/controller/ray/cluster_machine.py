"""Hardware of a cluster's nodes, reported by each node, and errors of nodes without a report."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, NodeDiedError, RayError, TaskUnschedulableError

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.machine import Machine, Node, local_machine
from hybridrl.controller.node_tasks import SUBMIT_TIMEOUT_S, NodeTasks
from hybridrl.controller.ray.runtime import ALL_GPUS_VISIBLE, joined_cluster

# Seconds for the nodes to report their hardware; on one core, a process starts slowly.
REPORT_TIMEOUT_S = 60.0


def cluster_machine() -> Machine:
    """Return the hardware of the cluster at RAY_ADDRESS, limited to Ray's resources.

    Raises:
        ConfigError: the cluster cannot be joined, or a node does not report its hardware.
    """
    with joined_cluster(ALL_GPUS_VISIBLE):
        return machine_of([node for node in ray.nodes() if node["Alive"]])


def machine_of(nodes: Sequence[Mapping[str, Any]]) -> Machine:
    """Return the hardware of some nodes of `ray.nodes()`.

    Raises:
        ConfigError: a node does not report it.
    """
    answers = _answers([node["NodeID"] for node in nodes])
    problems = list(_problems(nodes, answers))
    if problems:
        raise ConfigError(*problems)
    return Machine(
        tuple(
            _granted(node["Resources"], answers.machines[node["NodeID"]].nodes[0]) for node in nodes
        )
    )


@dataclass(frozen=True)
class _Answers:
    """Answers by node; a node in none of the collections did not answer.

    Attributes:
        machines: hardware.
        failures: reason why a node cannot report, in one line.
        refused: nodes for which Ray accepted no task.
    """

    machines: dict[str, Machine] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)


def _answers(node_ids: Sequence[str]) -> _Answers:
    nodes, refs, answers = NodeTasks(), {}, _Answers()
    for node_id in node_ids:
        try:
            refs[node_id] = nodes.submit(node_id, local_machine, retries=3)
        except GetTimeoutError:
            answers.refused.add(node_id)
    if refs:
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=REPORT_TIMEOUT_S)
    for node_id, ref in refs.items():
        try:
            answers.machines[node_id] = ray.get(ref, timeout=0)
        except (GetTimeoutError, NodeDiedError, TaskUnschedulableError):
            continue  # no answer, or node lost
        except RayError as error:
            answers.failures[node_id] = _last_line(error)
    return answers


def _last_line(error: RayError) -> str:
    """Return the last line of Ray's error, the message of the remote exception."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def _problems(nodes: Sequence[Mapping[str, Any]], answers: _Answers) -> Iterator[str]:
    """Yield one problem for each kind of missing report."""
    failed, refused, silent = [], [], []
    for node in nodes:
        node_id, name = node["NodeID"], _named(node)
        if node_id in answers.failures:
            failed.append(f"{name}: {answers.failures[node_id]}")
        elif node_id in answers.refused:
            refused.append(name)
        elif node_id not in answers.machines:
            silent.append(name)
    begin, of = f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}:", f"of {len(nodes)} nodes"
    if failed:
        yield (
            f"{begin} {len(failed)} {of} could not report their hardware:\n"
            + "".join(f"{line}\n" for line in failed)
            + "Install the same hybridrl and packages there, in the Python that started Ray, or "
            "remove these nodes from the cluster."
        )
    if refused:
        yield (
            f"{begin} {len(refused)} {of} did not report their hardware: Ray accepted no task "
            f"within {SUBMIT_TIMEOUT_S:g} s: {', '.join(refused)}.\n"
            "The head may be overloaded: see `ray status`, try again, or restart Ray."
        )
    if silent:
        yield (
            f"{begin} {len(silent)} {of} did not report their hardware within "
            f"{REPORT_TIMEOUT_S:g} s: {', '.join(silent)}.\n"
            "See `ray status`; restart Ray there, or remove these nodes from the cluster."
        )


def _named(node: Mapping[str, Any]) -> str:
    """Name a node of `ray.nodes()` in messages."""
    where = f"{node['NodeManagerAddress']}, node {node['NodeID'][:8]}"
    return f"{node['NodeManagerHostname']} ({where})"


def _granted(resources: Mapping[str, float], node: Node) -> Node:
    """Limit the hardware of a node to Ray's resources."""
    gpus = node.gpus[: int(resources.get("GPU", 0))]
    return replace(node, cores=int(resources.get("CPU", 0)), gpus=gpus)

"""What the nodes of a cluster have, each asked for itself; and which do not say it, and why."""

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

# Seconds that a cluster's nodes have to say what they have; on one core a process starts slowly.
NODE_LOOK_S = 60.0


def cluster_machine() -> Machine:
    """What the nodes of the cluster at RAY_ADDRESS have, as much of it as Ray was given.

    Raises:
        ConfigError: the cluster cannot be joined, or nodes of it do not say what they have.
    """
    with joined_cluster(ALL_GPUS_VISIBLE):
        return machine_of([node for node in ray.nodes() if node["Alive"]])


def machine_of(nodes: Sequence[Mapping[str, Any]]) -> Machine:
    """What some nodes of `ray.nodes()` have.

    Raises:
        ConfigError: some do not say it.
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
    """What nodes said, by node; those that are in none of these did not answer.

    Attributes:
        machines: what they have.
        failures: why they cannot say it, in one line.
        refused: they were not asked, as Ray took no task.
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
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=NODE_LOOK_S)
    for node_id, ref in refs.items():
        try:
            answers.machines[node_id] = ray.get(ref, timeout=0)
        except (GetTimeoutError, NodeDiedError, TaskUnschedulableError):
            continue  # without an answer, or gone
        except RayError as error:
            answers.failures[node_id] = _last_line(error)
    return answers


def _last_line(error: RayError) -> str:
    """What went wrong: Ray's errors end with the lines that a process over there has left."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def _problems(nodes: Sequence[Mapping[str, Any]], answers: _Answers) -> Iterator[str]:
    """One for each way in which nodes do not say what they have."""
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
            f"{begin} {len(failed)} {of} could not say what they have:\n"
            + "".join(f"{line}\n" for line in failed)
            + "Install the same hybridrl and the same packages there, in the Python that Ray was "
            "started with, or leave them out of the cluster."
        )
    if refused:
        yield (
            f"{begin} {len(refused)} {of} could not be asked what they have, as Ray took no task "
            f"within {SUBMIT_TIMEOUT_S:g} s: {', '.join(refused)}.\n"
            "See `ray status` for the cluster, whose head may be overloaded; try again, or start "
            "Ray anew."
        )
    if silent:
        yield (
            f"{begin} {len(silent)} {of} did not say what they have within {NODE_LOOK_S:g} s: "
            f"{', '.join(silent)}.\n"
            "See `ray status` for them; start Ray there anew, or leave them out of the cluster."
        )


def _named(node: Mapping[str, Any]) -> str:
    """A node of `ray.nodes()`, for people."""
    where = f"{node['NodeManagerAddress']}, node {node['NodeID'][:8]}"
    return f"{node['NodeManagerHostname']} ({where})"


def _granted(resources: Mapping[str, float], node: Node) -> Node:
    """The part of a node that Ray may hand out."""
    gpus = node.gpus[: int(resources.get("GPU", 0))]
    return replace(node, cores=int(resources.get("CPU", 0)), gpus=gpus)

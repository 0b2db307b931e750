"""State of a Ray cluster as its head reports it, without joining the cluster.

Ray ends a client process that lacks a token, and waits long for a server that is not Ray.
Therefore the query runs in a separate process:
python -m hybridrl.controller.ray.cluster_view HOST:PORT
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum

METADATA_S = 5


class HeadReply(StrEnum):
    """Kind of the head's reply."""

    cluster = "cluster"
    other_token = "other_token"
    none = "none"


@dataclass(frozen=True)
class NodeState:
    """State of a node at the head: host name, IP address, reason if it is dead, ports of its Ray.

    It is alive while it reports to the head.
    """

    host: str
    address: str
    alive: bool
    reason: str
    node_manager_port: int = 0
    object_manager_port: int = 0


@dataclass(frozen=True)
class ClusterView:
    """Result of a query: error message, or the head's versions and all nodes, also dead ones."""

    reply: HeadReply
    detail: str = ""
    ray_version: str = ""
    python_version: str = ""
    nodes: tuple[NodeState, ...] = ()


def query_head(address: str, timeout_s: float) -> ClusterView:
    """Query the head at HOST:PORT; an error is part of the reply."""
    command = [sys.executable, "-m", "hybridrl.controller.ray.cluster_view", address]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return ClusterView(HeadReply.none, f"no answer within {timeout_s:g} s")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Check failed" in line]
        what = lines[0].partition("Check failed: ")[2] if lines else done.stderr[-300:]
        token = "token" in what.lower()
        return ClusterView(HeadReply.other_token if token else HeadReply.none, what)
    answer = json.loads(done.stdout.splitlines()[-1])
    nodes = tuple(NodeState(**node) for node in answer.pop("nodes"))
    return ClusterView(**answer | {"reply": HeadReply(answer["reply"]), "nodes": nodes})


def joined_view() -> ClusterView | None:
    """Return the state of the cluster that this process has joined, or None."""
    if "ray" not in sys.modules:
        return None
    import ray

    if not ray.is_initialized():
        return None
    nodes = tuple(
        NodeState(
            node["NodeManagerHostname"],
            node["NodeManagerAddress"],
            node["Alive"],
            node["DeathReasonMessage"] or "",
            node["NodeManagerPort"],
            node["ObjectManagerPort"],
        )
        for node in ray.nodes()
    )
    # Ray refuses to join a cluster of another version, of itself or of Python.
    return ClusterView(HeadReply.cluster, "", ray.__version__, sys.version.split()[0], nodes)


def main() -> None:
    """Print the state reported by the head at argv[1] as JSON."""
    sys.stdout.write(json.dumps(asdict(_ask(sys.argv[1]))) + "\n")


def _ask(address: str) -> ClusterView:
    from ray.exceptions import AuthenticationError, RayError

    from hybridrl.controller.ray import compat

    try:
        client = compat.head_client(address)
        metadata = client.internal_kv_get(
            b"CLUSTER_METADATA", namespace=b"cluster", timeout=METADATA_S
        )
        infos = client.get_all_node_info(timeout=METADATA_S).values()
    except AuthenticationError as error:
        return ClusterView(HeadReply.other_token, str(error).partition(". ")[0])
    except RayError as error:
        return ClusterView(HeadReply.none, str(error))
    versions = json.loads(metadata or b"{}")
    nodes = tuple(
        NodeState(
            node.node_manager_hostname,
            node.node_manager_address,
            node.state == 0,  # GcsNodeInfo.GcsNodeState.ALIVE
            node.death_info.reason_message,
            node.node_manager_port,
            node.object_manager_port,
        )
        for node in infos
    )
    ray_version, python = versions.get("ray_version", ""), versions.get("python_version", "")
    return ClusterView(HeadReply.cluster, "", ray_version, python, nodes)


if __name__ == "__main__":
    main()

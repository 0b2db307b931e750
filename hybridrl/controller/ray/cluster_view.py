"""What the head of a Ray cluster says of itself, without joining the cluster.

Ray ends the process that asks where a token is missing, and waits long for one that is no Ray;
hence a process of its own: python -m hybridrl.controller.ray.cluster_view HOST:PORT
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from enum import Enum

METADATA_S = 5


class HeadReply(Enum):
    """How the head replied."""

    cluster = "cluster"
    other_token = "other_token"
    none = "none"


@dataclass(frozen=True)
class NodeState:
    """A node as the head knows it.

    Attributes:
        host: its name.
        address: by which the others reach it.
        alive: whether it reports to the head.
        reason: why it is not alive.
        node_manager_port, object_manager_port: of its Ray.
    """

    host: str
    address: str
    alive: bool
    reason: str
    node_manager_port: int = 0
    object_manager_port: int = 0


@dataclass(frozen=True)
class ClusterView:
    """What came of asking.

    Attributes:
        reply: whether it was a cluster's head that would talk.
        detail: what went wrong.
        ray_version, python_version: the head's.
        nodes: all that the cluster has or had.
    """

    reply: HeadReply
    detail: str = ""
    ray_version: str = ""
    python_version: str = ""
    nodes: tuple[NodeState, ...] = ()


def ask(address: str, timeout_s: float) -> ClusterView:
    """Ask the head at HOST:PORT; whatever goes wrong is in the reply."""
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
    """The cluster that this process has joined; None if it has joined none."""
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
    """Write what the head at argv[1] says as JSON."""
    view = _ask(sys.argv[1])
    sys.stdout.write(json.dumps(asdict(view) | {"reply": view.reply.value}) + "\n")


def _ask(address: str) -> ClusterView:
    from ray.exceptions import AuthenticationError, RayError

    from hybridrl.controller.ray import compat

    try:
        client = compat.head_client(address)
        metadata = client.internal_kv_get(
            b"CLUSTER_METADATA", namespace=b"cluster", timeout=METADATA_S
        )
        found = client.get_all_node_info(timeout=METADATA_S).values()
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
        for node in found
    )
    return ClusterView(
        HeadReply.cluster,
        "",
        versions.get("ray_version", ""),
        versions.get("python_version", ""),
        nodes,
    )


if __name__ == "__main__":
    main()

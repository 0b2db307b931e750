"""Ranks that do not answer: looks at them on their nodes, and makes an error of what is found."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import ray
from ray.exceptions import RayError

from hybridrl.controller.errors import WorkerError
from hybridrl.controller.node_tasks import NodeTasks
from hybridrl.controller.placement import Slot
from hybridrl.controller.ray.compat import actor_state
from hybridrl.controller.watch.process_snapshot import process_snapshots, traces
from hybridrl.controller.watch.stall_report import RankReport, StallReport, report
from hybridrl.controller.watch.waiting import Host, by_node, call_with_timeout, log_tail

RAY_TIMEOUT_S = 2.0


def collect_report(
    nodes: NodeTasks, phase: str, late: Sequence[Host], num_ranks: int
) -> StallReport:
    """Who is where, without disturbing anybody.

    Args:
        nodes: of the pool.
        phase: what was called.
        late: the ranks that have not answered.
        num_ranks: all that were called.
    """
    late = [host if host.pid else _as_ray_knows(host) for host in late]
    members = by_node([host for host in late if host.pid])
    arguments = {node: ([host.pid for host in hosts],) for node, hosts in members.items()}
    found = nodes.run_each(process_snapshots, arguments)
    seen = {
        host: glimpse
        for node, node_glimpses in found.items()
        for host, glimpse in zip(members[node], node_glimpses, strict=True)
    }
    return StallReport(phase, [RankReport(host, seen.get(host)) for host in late], num_ranks)


def stall_error(
    nodes: NodeTasks, late: Sequence[Host], num_ranks: int, phase: str, finding: str, advice: str
) -> WorkerError:
    """The error of a call that does not end, with stacks and flight recorders written.

    Args:
        nodes, late, num_ranks, phase: as in `collect_report`.
        finding, advice: as in `report`.
    """
    scene = _with_traces(nodes, collect_report(nodes, phase, late, num_ranks))
    ordered = [sighting.host for sighting in scene.in_order()]
    text = f"{report(scene, finding, advice)}\n{log_tail(ordered[0])}".rstrip()
    return WorkerError([host.rank for host in ordered], phase, text)


def _as_ray_knows(host: Host) -> Host:
    """A process that has not yet said where it is; without a pid if Ray has not started it."""
    try:
        entry = call_with_timeout(RAY_TIMEOUT_S, partial(actor_state, host.handle))
    except (TimeoutError, RayError):
        return host
    address = entry.get("Address", {})
    if not address.get("IPAddress"):
        return host
    node_id, pid = address["NodeID"], entry["Pid"]
    names = [node["NodeManagerHostname"] for node in ray.nodes() if node["NodeID"] == node_id]
    name = names[0] if names else host.node_name
    return host._replace(
        slot=Slot(node_id, address["IPAddress"], host.slot.local_rank),
        pid=pid,
        node_name=name,
        log_file=host.log_file / f"{name}_pid{pid}.log",
    )


def _with_traces(nodes: NodeTasks, scene: StallReport) -> StallReport:
    members = by_node([sighting.host for sighting in scene.seen if sighting.host.pid])
    arguments = {
        node: ([h.pid for h in hosts], [h.rank for h in hosts], [h.log_file for h in hosts])
        for node, hosts in members.items()
    }
    written = {
        host: own
        for node, node_traces in nodes.run_each(traces, arguments).items()
        for host, own in zip(members[node], node_traces, strict=True)
    }
    seen = [s._replace(traces=written.get(s.host, s.traces)) for s in scene.seen]
    return replace(scene, seen=seen)

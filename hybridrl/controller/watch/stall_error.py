"""Stall errors: evidence about unfinished ranks, collected on their nodes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import ray
from ray.exceptions import RayError

from hybridrl.controller.errors import WorkerError
from hybridrl.controller.node_tasks import NodeTasks
from hybridrl.controller.placement import Slot
from hybridrl.controller.ray.compat import actor_state
from hybridrl.controller.watch.process_snapshot import process_snapshots, write_traces
from hybridrl.controller.watch.stall_report import RankReport, StallReport, format_report
from hybridrl.controller.watch.waiting import Host, by_node, call_with_timeout, log_tail

RAY_TIMEOUT_S = 2.0


def collect_report(
    nodes: NodeTasks, phase: str, late: Sequence[Host], num_ranks: int
) -> StallReport:
    """Collect position and state of unfinished ranks, without interfering with them.

    Args:
        nodes: nodes of the pool.
        phase: the call.
        late: the unfinished ranks.
        num_ranks: number of called ranks.
    """
    late = [host if host.pid else _completed_from_ray(host) for host in late]
    members = by_node([host for host in late if host.pid])
    arguments = {node: ([host.pid for host in hosts],) for node, hosts in members.items()}
    found = nodes.run_each(process_snapshots, arguments)
    seen = {
        host: snapshot
        for node, snapshots in found.items()
        for host, snapshot in zip(members[node], snapshots, strict=True)
    }
    return StallReport(phase, [RankReport(host, seen.get(host)) for host in late], num_ranks)


def stall_error(
    nodes: NodeTasks, late: Sequence[Host], num_ranks: int, phase: str, finding: str, advice: str
) -> WorkerError:
    """Build the error of a stalled call, after stacks and flight records are written.

    Args:
        nodes, late, num_ranks, phase: as in `collect_report`.
        finding, advice: as in `format_report`.
    """
    report = _with_traces(nodes, collect_report(nodes, phase, late, num_ranks))
    ordered = [rank.host for rank in report.in_order()]
    text = f"{format_report(report, finding, advice)}\n{log_tail(ordered[0])}".rstrip()
    return WorkerError([host.rank for host in ordered], phase, text)


def _completed_from_ray(host: Host) -> Host:
    """Complete a host without a report from Ray's record; no pid if not yet started."""
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


def _with_traces(nodes: NodeTasks, report: StallReport) -> StallReport:
    members = by_node([rank.host for rank in report.seen if rank.host.pid])
    arguments = {
        node: ([h.pid for h in hosts], [h.rank for h in hosts], [h.log_file for h in hosts])
        for node, hosts in members.items()
    }
    written = {
        host: own
        for node, node_traces in nodes.run_each(write_traces, arguments).items()
        for host, own in zip(members[node], node_traces, strict=True)
    }
    seen = [s._replace(traces=written.get(s.host, s.traces)) for s in report.seen]
    return replace(report, seen=seen)

"""Stall errors: evidence about unfinished ranks, collected on their nodes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from hybridrl.controller.background import call_with_timeout
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.node_tasks import NodeTasks
from hybridrl.controller.placement import Host, Slot, by_node
from hybridrl.controller.ray.compat import actor_state
from hybridrl.controller.watch.process_snapshot import process_snapshots, write_traces
from hybridrl.controller.watch.stall_report import RankReport, StallReport, format_report

RAY_TIMEOUT_S = 2.0


def collect_report(
    nodes: NodeTasks, phase: str, late: Sequence[Host], num_ranks: int
) -> StallReport:
    """Collect position and state of unfinished ranks, without interfering with them."""
    late = [host if host.pid else _completed_from_ray(host) for host in late]
    seen = _on_nodes(nodes, late, process_snapshots, lambda hosts: ([h.pid for h in hosts],))
    return StallReport(phase, [RankReport(host, seen.get(host)) for host in late], num_ranks)


def stall_error(nodes: NodeTasks, report: StallReport, finding: str, advice: str) -> WorkerError:
    """Build the error of a stalled call, after stacks and flight records are written."""
    written = _on_nodes(
        nodes,
        [rank.host for rank in report.seen],
        write_traces,
        lambda hosts: (
            [h.pid for h in hosts],
            [h.rank for h in hosts],
            [h.log_file for h in hosts],
        ),
    )
    seen = [rank._replace(traces=written.get(rank.host, rank.traces)) for rank in report.seen]
    report = replace(report, seen=seen)
    ordered = [rank.host for rank in report.in_order()]
    text = f"{format_report(report, finding, advice)}\n{ordered[0].log_tail()}".rstrip()
    return WorkerError([host.rank for host in ordered], report.phase, text)


def _on_nodes(
    nodes: NodeTasks,
    hosts: Sequence[Host],
    function: Callable[..., Sequence[Any]],
    arguments: Callable[[Sequence[Host]], tuple[Any, ...]],
) -> dict[Host, Any]:
    """Run a function on each node; return its results by the hosts there, as far as known."""
    members = by_node([host for host in hosts if host.pid])
    found = nodes.run_each(function, {node: arguments(there) for node, there in members.items()})
    return {
        host: value
        for node, values in found.items()
        for host, value in zip(members[node], values, strict=True)
    }


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

"""Network stage: addresses, interfaces, ports, bandwidth and a collective between nodes."""

import os
from collections.abc import Callable, Mapping, Sequence

from hybridrl.config.choices import NVLinkMulticast
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.multicast import turn_off_multicast
from hybridrl.controller.ray.node_probes import NodeProbes, call_all
from hybridrl.controller.rendezvous import given_port, port_band
from hybridrl.doctor.context import CheckContext, gather, gather_each, subset
from hybridrl.doctor.findings import Finding, Verdict, fail, ok, skipped
from hybridrl.doctor.network import bandwidth, collective, infiniband, interfaces, nodes, ports
from hybridrl.doctor.network.server import close_ports, open_ports, service_ports
from hybridrl.doctor.stages import dispensable

LOOK_S = 15.0

# Nodes that the run does not need, if these are the findings.
Dispensable = Callable[[Sequence[Finding]], frozenset[str]]


def check(context: CheckContext) -> list[Finding]:
    """Make all checks network.*."""
    hosts = subset(context.agents, [node for node, slots in context.slots.items() if slots])
    cluster = context.config.cluster
    if cluster.nvlink_multicast is NVLinkMulticast.off:
        call_all(hosts, turn_off_multicast)
    return examine(
        hosts,
        cluster.rendezvous_ports,
        on_gpu=context.on_gpu,
        quick=context.quick,
        dispensable=lambda findings: dispensable(findings, context),
    )


def examine(
    agents: NodeProbes,
    rendezvous_ports: Sequence[int],
    *,
    on_gpu: bool,
    quick: bool,
    dispensable: Dispensable = lambda findings: frozenset(),
) -> list[Finding]:
    """Make all checks network.* of nodes that may get ranks.

    `quick` skips bandwidth and collective, which take seconds or import torch; `dispensable`
    returns nodes to exclude from these.
    """
    master = os.environ.get("MASTER_ADDR", "")
    views, found = gather(agents, nodes.CHECK, nodes.look, master, timeout_s=LOOK_S)
    if not views:
        return found
    addresses = {node: agents.addresses[node] for node in views}
    judged = nodes.judge(views, addresses, master)
    found += judged + infiniband.check(agents)
    if any(finding.verdict is Verdict.fail for finding in judged):
        master = ""  # has a finding already; the ports are checked without it
    needed = None if quick else dispensable
    found += _on_sockets(agents, rendezvous_ports, views, addresses, master, needed)
    if quick:
        return found
    rest, failures = _without(dispensable(found), addresses, found)
    if failures:
        return [*found, skipped(collective.CHECK, "all", "the failures above would make it hang")]
    of_rest = {node: views[node] for node in rest}
    return found + collective.check(subset(agents, rest), of_rest, rest, on_gpu=on_gpu)


def _without(
    unfit: frozenset[str], addresses: Mapping[str, str], findings: Sequence[Finding]
) -> tuple[dict[str, str], list[Finding]]:
    """Return addresses and failures of the other nodes."""
    rest = {node: own for node, own in addresses.items() if node not in unfit}
    failures = [finding for finding in findings if finding.verdict is Verdict.fail]
    return rest, [one for one in failures if not unfit & {*one.node.split(" -> ")}]


def _on_sockets(
    agents: NodeProbes,
    rendezvous_ports: Sequence[int],
    views: Mapping[str, nodes.NodeView],
    addresses: Mapping[str, str],
    master: str,
    dispensable: Dispensable | None,
) -> list[Finding]:
    """Make the checks that need listening sockets; bandwidth only with `dispensable`."""
    low, high = rendezvous_ports
    try:
        given = given_port()
    except ConfigError as error:
        advice = "Unset MASTER_PORT, or set it to a free port."
        return [*interfaces.judge(views), fail(ports.RENDEZVOUS, "all", error.texts[0], advice)]
    band = port_band(low, high) if given is None else range(given, given + 1)
    zero = nodes.rank_zero_node(addresses)
    meeting = {**addresses, **({zero: master} if master else {})}
    services, choices = service_ports(addresses), interfaces.choices(views, addresses)
    arguments = {
        node: (own, meeting[node], band, services[node], [c.address for c in choices[node]])
        for node, own in addresses.items()
    }
    opened, found = gather_each(agents, ports.CHECK, open_ports, arguments, LOOK_S)
    try:
        if len(addresses) == 1 and not master and given is None:
            found.append(ok(ports.RENDEZVOUS, zero, ports.IN_A_FILE))
        elif zero in opened:
            found.append(ports.judge_rendezvous(zero, opened[zero], (low, high), band, given))
        if not opened:
            return found
        attempts, silent = ports.connect(agents, opened, addresses, meeting, choices)
        found += silent + ports.judge(attempts, opened, addresses)
        found += interfaces.judge(views, attempts, addresses)
        if dispensable is None:
            return found
        rest, failures = _without(dispensable(found), addresses, found)
        if any(finding.check == ports.CHECK for finding in failures):
            return [*found, skipped(bandwidth.CHECK, "all", "not all nodes reach each other")]
        measured = {node: sockets for node, sockets in opened.items() if node in rest}
        return found + bandwidth.check(agents, measured, rest)
    finally:
        closing = {node: (sockets.token,) for node, sockets in opened.items()}
        agents.call_each(close_ports, closing, LOOK_S)

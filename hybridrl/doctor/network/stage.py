"""Network stage: addresses, interfaces, ports, and ranks that measure each other."""

import os
from collections.abc import Callable, Mapping, Sequence

from hybridrl.config.choices import NVLinkMulticast
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.multicast import turn_off_multicast
from hybridrl.controller.ray.node_probes import NodeProbes, call_all
from hybridrl.controller.rendezvous import given_port, port_band
from hybridrl.doctor.findings import Finding, Verdict, fail, ok, skipped
from hybridrl.doctor.network import infiniband, nodes, ports, ranks
from hybridrl.doctor.network.server import close_ports, open_ports, service_ports
from hybridrl.doctor.network.speeds import BANDWIDTH, COLLECTIVE
from hybridrl.doctor.stages import CheckContext, dispensable, gather, gather_each, subset

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

    `quick` leaves out the ranks, which import torch. `dispensable` returns nodes to leave out.
    """
    master = os.environ.get("MASTER_ADDR", "")
    views, findings = gather(agents, nodes.ADDRESS, nodes.look, master, timeout_s=LOOK_S)
    if not views:
        return findings
    addresses = {node: agents.addresses[node] for node in views}
    judged = nodes.judge(views, addresses, master)
    findings += judged + infiniband.check(agents)
    if any(finding.verdict is Verdict.fail for finding in judged):
        master = ""  # has a finding already; the ports are checked without it
    findings += _on_sockets(agents, rendezvous_ports, views, addresses, master)
    if quick:
        return findings
    unfit = dispensable(findings)
    failed = [{*one.node.split(" -> ")} for one in findings if one.verdict is Verdict.fail]
    if any(not unfit & named for named in failed):
        why = "the failures above would make it hang"
        return [*findings, *(skipped(name, "all", why) for name in (BANDWIDTH, COLLECTIVE))]
    rest = {node: own for node, own in addresses.items() if node not in unfit}
    of_rest = {node: views[node] for node in rest}
    return findings + ranks.check(subset(agents, rest), of_rest, rest, on_gpu=on_gpu)


def _on_sockets(
    agents: NodeProbes,
    rendezvous_ports: Sequence[int],
    views: Mapping[str, nodes.NodeView],
    addresses: Mapping[str, str],
    master: str,
) -> list[Finding]:
    """Make the checks that need listening sockets."""
    low, high = rendezvous_ports
    try:
        given = given_port()
    except ConfigError as error:
        advice = "Unset MASTER_PORT, or set it to a free port."
        wrong = fail(ports.RENDEZVOUS, "all", error.texts[0], advice)
        return [*ports.judge_interfaces(views), wrong]
    band = port_band(low, high) if given is None else range(given, given + 1)
    zero = nodes.rank_zero_node(addresses)
    meeting = {**addresses, **({zero: master} if master else {})}
    services, choices = service_ports(addresses), nodes.choices(views, addresses)
    arguments = {
        node: (own, meeting[node], [*band], [*services[node]], [c.address for c in choices[node]])
        for node, own in addresses.items()
    }
    opened, findings = gather_each(agents, ports.CHECK, open_ports, arguments, LOOK_S)
    try:
        if len(addresses) == 1 and not master and given is None:
            findings.append(ok(ports.RENDEZVOUS, zero, ports.IN_A_FILE))
        elif zero in opened:
            findings.append(ports.judge_rendezvous(zero, opened[zero], (low, high), band, given))
        if not opened:
            return findings
        attempts, silent = ports.connect(agents, opened, addresses, meeting, choices)
        findings += silent + ports.judge(attempts, opened, addresses)
        return findings + ports.judge_interfaces(views, attempts, addresses)
    finally:
        closing = {node: (sockets.token,) for node, sockets in opened.items()}
        agents.call_each(close_ports, closing, LOOK_S)

"""The stage of the network: what would hang or slow down a run between nodes.

network.address       network_address.py
network.interfaces    network_interfaces.py
network.ports         network_ports.py
network.rendezvous    network_rendezvous.py
network.bandwidth     network_bandwidth.py
network.collective    network_collective.py
network.infiniband    network_infiniband.py
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from hybridrl.config.choices import Accelerator, NVLinkMulticast
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.multicast import turn_off_multicast
from hybridrl.controller.ray.node_probes import NodeProbes, call_all
from hybridrl.controller.rendezvous import given_port, port_band
from hybridrl.doctor import spare
from hybridrl.doctor.findings import Finding, Verdict, fail, ok, skipped
from hybridrl.doctor.host.stage import heard
from hybridrl.doctor.network import address as network_address
from hybridrl.doctor.network import bandwidth as network_bandwidth
from hybridrl.doctor.network import collective as network_collective
from hybridrl.doctor.network import infiniband as network_infiniband
from hybridrl.doctor.network import interfaces as network_interfaces
from hybridrl.doctor.network import ports as network_ports
from hybridrl.doctor.network import rendezvous as network_rendezvous
from hybridrl.doctor.network.nodes import look, rank_zero_node
from hybridrl.doctor.network.ray import service_ports
from hybridrl.doctor.network.server import Opened, close_ports, open_ports
from hybridrl.doctor.spare import SomeAgents
from hybridrl.doctor.stages import Case

LOOK_S = 15.0

Dispensable = Callable[[Sequence[Finding]], frozenset[str]]


def check(case: Case) -> list[Finding]:
    """Findings of the stage network."""
    hosts = SomeAgents(case.agents, [node for node, slots in case.slots.items() if slots])
    if case.config.cluster.nvlink_multicast is NVLinkMulticast.off:
        call_all(hosts, turn_off_multicast)
    return examine(
        hosts,
        case.config.cluster.rendezvous_ports,
        on_gpu=case.config.hardware.accelerator is Accelerator.gpu,
        quick=case.quick,
        dispensable=lambda findings: spare.dispensable(findings, case),
    )


def nobody(findings: Sequence[Finding]) -> frozenset[str]:
    """No node, whatever is found: the run needs them all."""
    del findings
    return frozenset()


def examine(
    agents: NodeProbes,
    rendezvous_ports: Sequence[int],
    *,
    on_gpu: bool,
    quick: bool,
    dispensable: Dispensable = nobody,
) -> list[Finding]:
    """As `check`, from what the stage needs of a config.

    Args:
        agents: the nodes that ranks may come to.
        rendezvous_ports: cluster.rendezvous_ports.
        on_gpu: whether the run uses NCCL.
        quick: leave out what takes seconds or imports torch: bandwidth and collective.
        dispensable: nodes that the run can do without, if these are their failures; what takes
            all nodes at once is done by the others.
    """
    master = os.environ.get("MASTER_ADDR", "")
    views, findings = heard(network_address.CHECK, call_all(agents, look, master, timeout_s=LOOK_S))
    if not views:
        return findings
    addresses = {node: agents.addresses[node] for node in views}
    judged = network_address.judge(views, addresses, master)
    findings += judged
    findings += network_interfaces.check(agents, views)
    findings += network_infiniband.check(agents)
    if _failures(judged):
        master = ""  # its own finding; the ports are tried all the same
    findings += _on_sockets(
        agents, rendezvous_ports, addresses, master, None if quick else dispensable
    )
    if quick:
        return findings
    rest, failures = _without(dispensable(findings), addresses, findings)
    if failures:
        why = "what is found above would make it hang"
        return [*findings, skipped(network_collective.CHECK, "all", why)]
    views = {node: views[node] for node in rest}
    some = SomeAgents(agents, rest)
    return findings + network_collective.check(some, views, rest, on_gpu=on_gpu)


def _without(
    nodes: frozenset[str], addresses: Mapping[str, str], findings: Sequence[Finding]
) -> tuple[dict[str, str], list[Finding]]:
    """The addresses of the other nodes, and the failures that are theirs."""
    rest = {node: address for node, address in addresses.items() if node not in nodes}
    failures = [f for f in _failures(findings) if not nodes & {*f.node.split(" -> ")}]
    return rest, failures


def _on_sockets(
    agents: NodeProbes,
    rendezvous_ports: Sequence[int],
    addresses: Mapping[str, str],
    master: str,
    dispensable: Dispensable | None,
) -> list[Finding]:
    """The checks that listen on every node, while all of them listen.

    Without `dispensable` nothing is measured.
    """
    low, high = rendezvous_ports
    try:
        given = given_port()
    except ConfigError as error:
        advice = "Unset MASTER_PORT, or set it to a free port."
        return [fail(network_rendezvous.CHECK, "all", error.problems[0], advice)]
    band = port_band(low, high) if given is None else range(given, given + 1)
    first = rank_zero_node(addresses)
    meeting = {**addresses, **({first: master} if master else {})}
    with _opened(agents, addresses, meeting, band) as (
        opened,
        findings,
    ):
        if len(addresses) == 1 and not master and given is None:
            findings.append(ok(network_rendezvous.CHECK, first, network_rendezvous.IN_A_FILE))
        elif first in opened:
            findings.append(
                network_rendezvous.judge(first, opened[first], (low, high), band, given)
            )
        if opened:
            findings += network_ports.check(agents, opened, addresses, meeting)
        if dispensable is None or not opened:
            return findings
        rest, failures = _without(dispensable(findings), addresses, findings)
        if any(finding.check == network_ports.CHECK for finding in failures):
            why = "not all nodes reach each other"
            return [*findings, skipped(network_bandwidth.CHECK, "all", why)]
        opened = {node: ports for node, ports in opened.items() if node in rest}
        return findings + network_bandwidth.check(agents, opened, rest)


@contextmanager
def _opened(
    agents: NodeProbes, addresses: Mapping[str, str], meeting: Mapping[str, str], band: range
) -> Iterator[tuple[dict[str, Opened], list[Finding]]]:
    """Every node listening for the time of the block."""
    services = service_ports(addresses)
    arguments = {
        node: (address, meeting[node], band, services[node]) for node, address in addresses.items()
    }
    answers = agents.call_each(open_ports, arguments, LOOK_S)
    opened, findings = heard(network_ports.CHECK, answers)
    try:
        yield opened, findings
    finally:
        closing = {node: (ports.token,) for node, ports in opened.items()}
        agents.call_each(close_ports, closing, LOOK_S)


def _failures(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict is Verdict.fail]

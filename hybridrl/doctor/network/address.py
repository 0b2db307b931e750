"""Does each node know itself by an address that leads to it from the others?"""

from collections.abc import Mapping

from hybridrl.doctor.findings import Finding, fail, ok, warn
from hybridrl.doctor.network.nodes import NodeView, is_loopback, rank_zero_node

CHECK = "network.address"


def judge(
    views: Mapping[str, NodeView], addresses: Mapping[str, str], master: str
) -> list[Finding]:
    """Findings from what the nodes say of themselves.

    Args:
        views: by node.
        addresses: by which the others know a node.
        master: MASTER_ADDR as the driver has it; empty if unset.
    """
    on_one_machine = len({view.host_name for view in views.values()}) == 1
    findings = [
        _judge_node(node, view, addresses[node], on_one_machine) for node, view in views.items()
    ]
    if master and views:
        findings.append(_judge_master(views, addresses, master))
    return findings


def _judge_node(node: str, view: NodeView, address: str, on_one_machine: bool) -> Finding:
    if is_loopback(address) and not on_one_machine:
        return fail(
            CHECK,
            node,
            f"the others know {view.host_name} by {address}, which leads each of them to itself; "
            f"its interfaces: {view.describe()}",
            _own_address_advice(view),
        )
    if view.interface_of(address) is None and not is_loopback(address):
        return warn(
            CHECK,
            node,
            f"the others know it by {address}, which none of its interfaces has: {view.describe()}",
            "Behind NAT or in a container with a network of its own, NCCL and gloo tell the others "
            "an address that does not lead back: use the host's network (docker run "
            "--network=host; Kubernetes: hostNetwork: true), or ray start --node-ip-address="
            f"{_outward_address(view)}.",
        )
    return ok(CHECK, node, f"{address}{_host_name_remark(view, on_one_machine)}")


def _host_name_remark(view: NodeView, on_one_machine: bool) -> str:
    misleading = [text for text in view.host_addresses if is_loopback(text)]
    if on_one_machine or not misleading:
        return f" on {view.host_name}"
    return (
        f"; its own /etc/hosts takes {view.host_name} for {misleading[0]}, so the run names "
        "gloo's interface by the address"
    )


def _judge_master(
    views: Mapping[str, NodeView], addresses: Mapping[str, str], master: str
) -> Finding:
    first = rank_zero_node({node: addresses[node] for node in views})
    advice = (
        f"Unset MASTER_ADDR (the run takes {addresses[first]} by itself), or "
        f"export MASTER_ADDR={addresses[first]} where the run is started."
    )
    unknown = [node for node, view in views.items() if not view.master]
    if unknown:
        what = f"MASTER_ADDR={master} is unknown on {', '.join(unknown)}"
        return fail(CHECK, "all", what, advice)
    # Rank 0's own node may take its name for 127.0.1.1: it listens on all addresses of a name.
    seen = {node: view.master[0] for node, view in views.items() if node != first}
    if len(set(seen.values())) > 1:
        each = ", ".join(f"{address} on {node}" for node, address in seen.items())
        return fail(
            CHECK, "all", f"MASTER_ADDR={master} is not the same everywhere: {each}", advice
        )
    address = next(iter(seen.values()), views[first].master[0])
    if len(views) > 1 and is_loopback(address) and not is_loopback(addresses[first]):
        what = f"MASTER_ADDR={master} is {address}, which leads each node to itself"
        return fail(CHECK, "all", what, advice)
    if views[first].interface_of(address) is None and not is_loopback(address):
        owner = [node for node, view in views.items() if view.interface_of(address)]
        whose = f"belongs to {owner[0]}" if owner else "belongs to none of the nodes"
        return fail(
            CHECK,
            "all",
            f"MASTER_ADDR={master} is {address}, which {whose}; rank 0 is on {first}, which has "
            f"{views[first].describe()}",
            advice,
        )
    return ok(CHECK, "all", f"MASTER_ADDR={master} is {address} on all nodes, of {first}")


def _own_address_advice(view: NodeView) -> str:
    address = _outward_address(view)
    loopback = [text for text in view.host_addresses if is_loopback(text)]
    hosts = (
        f" In its /etc/hosts, give {view.host_name} the address {address} in place of "
        f"{loopback[0]}."
        if loopback
        else ""
    )
    return f"Start Ray there with --node-ip-address={address}.{hosts}"


def _outward_address(view: NodeView) -> str:
    outward = [text.split("/")[0] for texts in view.outward.values() for text in texts]
    return outward[0] if outward else "<an address that the others reach>"

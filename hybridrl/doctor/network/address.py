"""Check network.address: each node's address and MASTER_ADDR lead there from all nodes."""

from collections.abc import Mapping

from hybridrl.doctor.findings import Finding, Rule, fail, fails_if, first, ok, warn
from hybridrl.doctor.network.nodes import NodeView, is_loopback, rank_zero_node

CHECK = "network.address"


def judge(
    views: Mapping[str, NodeView], addresses: Mapping[str, str], master: str
) -> list[Finding]:
    """Judge the addresses of all nodes, and MASTER_ADDR of the driver, if it is set."""
    on_one_machine = len({view.host_name for view in views.values()}) == 1
    found = [_judge_node(n, view, addresses[n], on_one_machine) for n, view in views.items()]
    if master and views:
        found.append(_judge_master(views, addresses, master))
    return found


def _judge_node(node: str, view: NodeView, address: str, on_one_machine: bool) -> Finding:
    outward = [text.split("/")[0] for texts in view.outward.values() for text in texts]
    own = outward[0] if outward else "<an address that the others reach>"
    misleading = [text for text in view.host_addresses if is_loopback(text)]
    hosts = f" and set {view.host_name} to {own} in its /etc/hosts" if misleading else ""
    if is_loopback(address) and not on_one_machine:
        evidence = f"the others know {view.host_name} by {address}, which leads each of them to "
        evidence += f"itself; its interfaces: {view.describe()}"
        return fail(CHECK, node, evidence, f"Start Ray there with --node-ip-address={own}{hosts}.")
    if view.interface_of(address) is None and not is_loopback(address):
        evidence = f"the others know it by {address}, but none of its interfaces has that "
        evidence += f"address: {view.describe()}"
        advice = (
            "Behind NAT or in a container network, NCCL and gloo announce an address that the "
            "others cannot reach: use the host's network (docker run --network=host; Kubernetes: "
            f"hostNetwork: true), or ray start --node-ip-address={own}."
        )
        return warn(CHECK, node, evidence, advice)
    remark = f" on {view.host_name}"
    if misleading and not on_one_machine:
        remark = f"; its /etc/hosts maps {view.host_name} to {misleading[0]}, so the run names "
        remark += "gloo's interface by the address"
    return ok(CHECK, node, f"{address}{remark}")


def _judge_master(
    views: Mapping[str, NodeView], addresses: Mapping[str, str], master: str
) -> Finding:
    zero = rank_zero_node({node: addresses[node] for node in views})
    own = addresses[zero]
    advice = f"Unset MASTER_ADDR (the run uses {own}), or export MASTER_ADDR={own} for the run."
    unknown = [node for node, view in views.items() if not view.master]
    # Rank 0's node may resolve its name to 127.0.1.1: it listens on all addresses of a name.
    seen = {n: view.master[0] for n, view in views.items() if n != zero and view.master}
    each = ", ".join(f"{address} on {node}" for node, address in seen.items())
    address = next(iter([*seen.values(), *views[zero].master]), "0.0.0.0")
    loopback = is_loopback(address)
    owners = [node for node, view in views.items() if view.interface_of(address)]
    owner = f"belongs to {owners[0]}" if owners else "belongs to none of the nodes"
    what = f"MASTER_ADDR={master}"
    different = len(set(seen.values())) > 1
    to_itself = len(views) > 1 and loopback and not is_loopback(own)
    misplaced = (
        f"{what} is {address}, which {owner}; rank 0 is on {zero}, which has "
        f"{views[zero].describe()}"
    )
    rules: list[Rule] = [
        (fails_if(unknown), f"{what} is unknown on {', '.join(unknown)}", advice),
        (fails_if(different), f"{what} is not the same everywhere: {each}", advice),
        (fails_if(to_itself), f"{what} is {address}, which leads each node to itself", advice),
        (fails_if(zero not in owners and not loopback), misplaced, advice),
    ]
    return first(CHECK, "all", rules, f"{what} is {address} on all nodes, of {zero}")

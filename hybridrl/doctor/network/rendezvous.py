"""Is there a port on which the ranks can meet, and does the kernel leave it alone?"""

from hybridrl.doctor.findings import Finding, fail, ok, warn
from hybridrl.doctor.network.server import Opened

CHECK = "network.rendezvous"
IN_A_FILE = "the ranks of one node meet in a file of their user's, at no port"
MAX_HOLDERS = 4


def judge(
    node: str, opened: Opened, wanted: tuple[int, int], band: range, given: int | None
) -> Finding:
    """A finding from what rank 0's node has opened.

    Args:
        node: rank 0's.
        opened: what it listens on.
        wanted: cluster.rendezvous_ports.
        band: the ports that were tried.
        given: MASTER_PORT, if it is set.
    """
    low, high = opened.ephemeral
    holders = ", ".join(opened.holders[:MAX_HOLDERS]) or "/proc does not show who holds them"
    if opened.rendezvous is None:
        return _none_free(node, opened.problem, holders, given)
    held = f"port {opened.rendezvous} is free and was held while the network was examined"
    if opened.rendezvous != band[0]:
        held += f" ({holders})"
    if low <= opened.rendezvous <= high:
        name = "MASTER_PORT" if given is not None else "cluster.rendezvous_ports"
        return warn(
            CHECK,
            node,
            f"{held}; it lies in ip_local_port_range ({low} to {high}), from which the kernel may "
            "give it to any connection before the run has it",
            f"Set {name} outside of {low} to {high}, or keep the kernel from it: sysctl -w "
            f"net.ipv4.ip_local_reserved_ports={band[0]}-{band[-1]}.",
        )
    if given is None and (band[0], band[-1]) != wanted:
        held += (
            f"; not of cluster.rendezvous_ports ({wanted[0]} to {wanted[1]}), of which the kernel "
            f"gives some to connections (ip_local_port_range is {low} to {high})"
        )
    return ok(CHECK, node, held)


def _none_free(node: str, problem: str, holders: str, given: int | None) -> Finding:
    what, _, _ = problem.partition("\n")
    if given is not None:
        advice = "Unset MASTER_PORT (the run finds a free port), or set it to a free one"
    else:
        advice = "Set cluster.rendezvous_ports=[first,last] to free ports"
    return fail(
        CHECK, node, f"{what}; {holders}", f"{advice}, or end who holds it (`ss -ltnp` on {node})."
    )

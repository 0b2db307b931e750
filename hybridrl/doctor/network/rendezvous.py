"""Check network.rendezvous: a free port for the rendezvous, outside ip_local_port_range."""

from hybridrl.doctor.findings import Finding, fail, ok, warn
from hybridrl.doctor.network.server import Opened

CHECK = "network.rendezvous"
IN_A_FILE = "ranks of one node meet in a file of their user, without a port"
MAX_HOLDERS = 4


def judge(
    node: str, opened: Opened, wanted: tuple[int, int], band: range, given: int | None
) -> Finding:
    """Judge the sockets of rank 0's node for a band of ports; `given` is MASTER_PORT."""
    low, high = opened.ephemeral
    port = opened.rendezvous
    holders = ", ".join(opened.holders[:MAX_HOLDERS]) or "/proc does not show who holds them"
    name, setting = "cluster.rendezvous_ports", "Set cluster.rendezvous_ports=[first,last] to free"
    if given is not None:
        name, setting = "MASTER_PORT", "Unset MASTER_PORT (the run finds a port), or set it to free"
    free = f"port {port} is free and was held during the checks"
    if port != band[0]:
        free += f" ({holders})"
    if port is None:
        evidence = f"{opened.problem.partition(chr(10))[0]}; {holders}"
        advice = f"{setting} ports, or end their holder (`ss -ltnp` on {node})."
        return fail(CHECK, node, evidence, advice)
    if low <= port <= high:
        evidence = f"{free}; it lies in ip_local_port_range ({low} to {high}), from which the "
        evidence += "kernel may give it to any connection before the run listens"
        advice = f"Set {name} outside of {low} to {high}, or reserve the ports: sysctl -w "
        advice += f"net.ipv4.ip_local_reserved_ports={band[0]}-{band[-1]}."
        return warn(CHECK, node, evidence, advice)
    if given is None and (band[0], band[-1]) != wanted:
        free += f"; outside of cluster.rendezvous_ports ({wanted[0]} to {wanted[1]}), of which the "
        free += f"kernel uses some (ip_local_port_range is {low} to {high})"
    return ok(CHECK, node, free)

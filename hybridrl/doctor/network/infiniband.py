"""InfiniBand and RoCE: are the ports up, can they be opened, and is the GID index right?

The kernel shows ports in /sys, in containers that lack the devices in /dev, too.

Source: Linux, Documentation/ABI/stable/sysfs-class-infiniband.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hybridrl.controller.ray.node_probes import NodeProbes, call_all
from hybridrl.doctor.findings import Finding, fail, ok, skipped, warn
from hybridrl.doctor.host.stage import heard

CHECK = "network.infiniband"
ROOT = Path("/sys/class/infiniband")
# Where libibverbs opens adapters: uverbs0, uverbs1, ...
DEVICES = Path("/dev/infiniband")
ETHERNET = "Ethernet"
ROCE_V2 = "RoCE v2"
VARIABLES = ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_DISABLE")
GIVE_DEVICES = (
    "give the container the devices "
    "(docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1)"
)


class HCAPort(NamedTuple):
    """A port of a host channel adapter.

    Attributes:
        name: device and port, as NCCL_IB_HCA names them: mlx5_0:1.
        state: ACTIVE, INIT, DOWN, ...
        physical: LinkUp, Disabled, Polling, ...
        link_layer: InfiniBand or Ethernet (RoCE).
        rate: as the kernel writes it: 400 Gb/sec (4X NDR).
        gids: the type of each GID that is not empty (RoCE v2, IB/RoCE v1), by index.
    """

    name: str
    state: str
    physical: str
    link_layer: str
    rate: str
    gids: dict[int, str]


class Fabric(NamedTuple):
    """What a node has of InfiniBand and RoCE.

    Attributes:
        ports: those that the kernel shows.
        variables: what the environment tells NCCL about them.
        closed: why none can be opened; empty if one can, or where there are no ports.
    """

    ports: list[HCAPort]
    variables: dict[str, str]
    closed: str


def check(agents: NodeProbes, root: Path = ROOT, devices: Path = DEVICES) -> list[Finding]:
    """Look at every node's ports."""
    fabrics, findings = heard(CHECK, call_all(agents, look, root, devices))
    return findings + (judge(fabrics) if fabrics else [])


def look(root: Path, devices: Path) -> Fabric:
    """The ports below folders such as /sys/class/infiniband and /dev/infiniband."""
    ports = [_port(folder) for folder in sorted(root.glob("*/ports/*"))]
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return Fabric(ports, variables, _why_closed(devices) if ports else "")


def judge(fabrics: Mapping[str, Fabric]) -> list[Finding]:
    """Findings from the ports of all nodes."""
    if not any(fabric.ports for fabric in fabrics.values()):
        return [skipped(CHECK, "all", "no node has an InfiniBand or RoCE adapter")]
    without = [node for node, fabric in fabrics.items() if not fabric.ports]
    findings = [
        warn(
            CHECK,
            node,
            f"no adapter in {ROOT}, while other nodes have some: NCCL falls back to TCP for it",
            f"Load the driver (`lsmod | grep ib_core`, `ibstat`), or {GIVE_DEVICES}.",
        )
        for node in without
    ]
    for node, fabric in fabrics.items():
        if fabric.ports:
            ports = used_ports(fabric)
            problems = [f for port in ports for f in _judge_port(node, fabric, port)]
            if not ports and not _is_off(fabric):
                problems = [_none_named(node, fabric)]
            elif fabric.closed:
                problems.insert(0, _closed(node, fabric, alone=len(fabrics) == 1))
            findings += problems or [ok(CHECK, node, "; ".join(map(_text, fabric.ports)))]
    return findings


def used_ports(fabric: Fabric) -> list[HCAPort]:
    """The ports that NCCL_IB_HCA leaves: prefixes, after = whole names, after ^ none of them."""
    if _is_off(fabric):
        return []
    spec = fabric.variables.get("NCCL_IB_HCA", "")
    if not spec:
        return fabric.ports
    exclude, spec = spec.startswith("^"), spec.removeprefix("^")
    exact, spec = spec.startswith("="), spec.removeprefix("=")

    def hit(port: HCAPort) -> bool:
        device = port.name.partition(":")[0]
        for word in spec.split(","):
            name = port.name if ":" in word else device
            if name == word if exact else name.startswith(word):
                return True
        return False

    return [port for port in fabric.ports if hit(port) != exclude]


def _is_off(fabric: Fabric) -> bool:
    return fabric.variables.get("NCCL_IB_DISABLE") == "1"


def _closed(node: str, fabric: Fabric, *, alone: bool) -> Finding:
    """A failure where the run would be slow without a word: not of one node, nor on purpose."""
    names = ", ".join(port.name for port in fabric.ports)
    return (warn if alone or _is_off(fabric) else fail)(
        CHECK,
        node,
        f"the kernel shows {names}, but {fabric.closed}: between nodes NCCL goes over TCP without "
        "a word",
        f"In a container: {GIVE_DEVICES}, as deploy/docker/run.sh does; in a pod ask for what the "
        "cluster's device plugin calls them. Elsewhere load ib_uverbs (`ls -l /dev/infiniband`). "
        "Over TCP on purpose: NCCL_IB_DISABLE=1.",
    )


def _none_named(node: str, fabric: Fabric) -> Finding:
    names, spec = [port.name for port in fabric.ports], fabric.variables["NCCL_IB_HCA"]
    verdict = warn if spec.startswith("^") else fail  # to exclude all of them may be meant
    return verdict(
        CHECK,
        node,
        f"NCCL_IB_HCA={spec} leaves none of the node's adapters "
        f"({', '.join(names)}): NCCL goes over TCP, or fails where NCCL_NET=IB",
        f"Unset NCCL_IB_HCA, or export NCCL_IB_HCA={names[0].partition(':')[0]} or others of "
        "these; over TCP on purpose: NCCL_IB_DISABLE=1.",
    )


def _judge_port(node: str, fabric: Fabric, port: HCAPort) -> list[Finding]:
    if port.state != "ACTIVE":
        named = "NCCL_IB_HCA" in fabric.variables
        verdict = fail if named or _none_active(fabric) else warn
        return [
            verdict(
                CHECK,
                node,
                f"{_text(port)}{' (named in NCCL_IB_HCA)' if named else ''}",
                "See `ibstat` and the cable; physical Polling: no link; state INIT: no subnet "
                f"manager runs. Or leave it out: export NCCL_IB_HCA=^={port.name}; over TCP alone: "
                "NCCL_IB_DISABLE=1.",
            )
        ]
    index = fabric.variables.get("NCCL_IB_GID_INDEX")
    if port.link_layer != ETHERNET or index is None or index == "-1":
        return []
    kind = port.gids.get(int(index), "empty") if index.isdecimal() else "no number"
    if kind == ROCE_V2:
        return []
    good = [str(number) for number, name in port.gids.items() if name == ROCE_V2]
    return [
        fail(
            CHECK,
            node,
            f"NCCL_IB_GID_INDEX={index} is {kind} on {port.name}; RoCE v2 needs one of "
            f"{', '.join(good) or 'none, as the port has no address'}",
            f"Unset NCCL_IB_GID_INDEX (NCCL finds it by itself since 2.21)"
            f"{f', or export NCCL_IB_GID_INDEX={good[-1]}' if good else ''}; `show_gids` lists "
            "them.",
        )
    ]


def _none_active(fabric: Fabric) -> bool:
    return not any(port.state == "ACTIVE" for port in fabric.ports)


def _text(port: HCAPort) -> str:
    return f"{port.name} {port.state}, {port.physical}, {port.link_layer}, {port.rate}"


def _port(folder: Path) -> HCAPort:
    gids = {}
    for file in (folder / "gids").glob("*"):
        gid = _read(file)
        if gid.strip("0:"):
            gids[int(file.name)] = _read(folder / "gid_attrs" / "types" / file.name)
    return HCAPort(
        f"{folder.parent.parent.name}:{folder.name}",
        _read(folder / "state").rpartition(": ")[2],
        _read(folder / "phys_state").rpartition(": ")[2],
        _read(folder / "link_layer"),
        _read(folder / "rate"),
        dict(sorted(gids.items())),
    )


def _why_closed(devices: Path) -> str:
    """Why no adapter can be opened to read and write, as libibverbs does; empty if one can."""
    problems = []
    for path in sorted(devices.glob("uverbs*")):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            problems.append(f"{path} cannot be opened ({error.strerror})")
        else:
            return ""
    return "; ".join(problems) or f"there is no {devices}/uverbs*"


def _read(file: Path) -> str:
    """A file's one line; empty where the kernel has none (types of empty GIDs raise EINVAL)."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""

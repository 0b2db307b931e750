"""Check network.infiniband: ports of InfiniBand and RoCE, their devices and the GID index.

Containers see ports in /sys even without the devices in /dev.

Source: Linux, Documentation/ABI/stable/sysfs-class-infiniband.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.doctor.findings import Finding, Rule, Verdict, apply, fails_if, severity, skipped
from hybridrl.doctor.host.facts import INFINIBAND
from hybridrl.doctor.network.nodes import matching
from hybridrl.doctor.stages import gather

CHECK = "network.infiniband"
# Devices that libibverbs opens: uverbs0, uverbs1, ...
DEVICES = Path("/dev/infiniband")
ETHERNET, ROCE_V2 = "Ethernet", "RoCE v2"
VARIABLES = ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_DISABLE")
GIVE_DEVICES = (
    "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 (Kubernetes: the "
    "device plugin's resources)"
)


class HCAPort(NamedTuple):
    """A port of a host channel adapter, as /sys prints it.

    Attributes:
        name: device and port, as in NCCL_IB_HCA: mlx5_0:1.
        state: ACTIVE, INIT, DOWN, ...
        physical: LinkUp, Disabled, Polling, ...
        link_layer: InfiniBand or Ethernet (RoCE).
        gids: types of the GIDs (RoCE v2, IB/RoCE v1), by index, without empty ones.
    """

    name: str
    state: str
    physical: str
    link_layer: str
    rate: str
    gids: dict[int, str]

    def __str__(self) -> str:
        return f"{self.name} {self.state}, {self.physical}, {self.link_layer}, {self.rate}"


class Fabric(NamedTuple):
    """Ports of a node, NCCL's variables for them, and why no device can be opened, if so."""

    ports: list[HCAPort]
    variables: dict[str, str]
    closed: str


def check(agents: NodeProbes, root: Path = INFINIBAND, devices: Path = DEVICES) -> list[Finding]:
    """Examine the ports of every node."""
    fabrics, findings = gather(agents, CHECK, look, root, devices)
    return findings + (judge(fabrics) if fabrics else [])


def look(root: Path, devices: Path) -> Fabric:
    """Read the ports in folders like /sys/class/infiniband and /dev/infiniband."""
    ports = [_port(folder) for folder in sorted(root.glob("*/ports/*"))]
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return Fabric(ports, variables, _why_closed(devices) if ports else "")


def judge(fabrics: Mapping[str, Fabric]) -> list[Finding]:
    """Judge the ports of all nodes."""
    if not any(fabric.ports for fabric in fabrics.values()):
        return [skipped(CHECK, "all", "no node has an InfiniBand or RoCE adapter")]
    findings = []
    for node, fabric in fabrics.items():
        rules = _rules(fabric, alone=len(fabrics) == 1)
        findings += apply(CHECK, node, rules, "; ".join(map(str, fabric.ports)))
    return findings


def _rules(fabric: Fabric, *, alone: bool) -> list[Rule]:
    """Return the rules for a node; `alone`: a run on one node needs no adapters."""
    if not fabric.ports:
        evidence = f"no adapter in {INFINIBAND}, but other nodes have some: NCCL uses TCP here"
        advice = f"Load the driver (`lsmod | grep ib_core`, `ibstat`), or {GIVE_DEVICES}."
        return [(Verdict.warn, evidence, advice)]
    used, variables = used_ports(fabric), fabric.variables
    is_off = variables.get("NCCL_IB_DISABLE") == "1"
    names = ", ".join(port.name for port in fabric.ports)
    spec = variables.get("NCCL_IB_HCA", "")
    if not used and not is_off:
        # Excluding all adapters may be intended.
        verdict = Verdict.warn if spec.startswith("^") else Verdict.fail
        evidence = f"NCCL_IB_HCA={spec} leaves none of the node's adapters ({names}): NCCL uses "
        device = fabric.ports[0].name.partition(":")[0]
        advice = f"Unset NCCL_IB_HCA, or export NCCL_IB_HCA={device}; for TCP: NCCL_IB_DISABLE=1."
        return [(verdict, f"{evidence}TCP, or fails with NCCL_NET=IB", advice)]
    rules: list[Rule] = [
        (
            severity(fabric.closed and not (alone or is_off), fabric.closed),
            f"the kernel shows {names}, but {fabric.closed}: between nodes NCCL silently uses TCP",
            f"{GIVE_DEVICES}; without a container: modprobe ib_uverbs. For TCP: NCCL_IB_DISABLE=1.",
        )
    ]
    named = "NCCL_IB_HCA" in variables
    none_active = all(port.state != "ACTIVE" for port in fabric.ports)
    index = variables.get("NCCL_IB_GID_INDEX", "-1")
    for port in used:
        down = port.state != "ACTIVE"
        kind = port.gids.get(int(index), "empty") if index.isdecimal() else "no number"
        wrong = port.link_layer == ETHERNET and index != "-1" and kind != ROCE_V2
        good = [str(number) for number, name in port.gids.items() if name == ROCE_V2]
        export = f", or export NCCL_IB_GID_INDEX={good[-1]}" if good else ""
        rules += [
            (
                severity(down and (named or none_active), down),
                f"{port}{' (named in NCCL_IB_HCA)' if named else ''}",
                "See `ibstat` (Polling: no link; INIT: no subnet manager runs), or export "
                f"NCCL_IB_HCA=^={port.name}",
            ),
            (
                fails_if(wrong and not down),
                f"NCCL_IB_GID_INDEX={index} is {kind} on {port.name}; RoCE v2 needs one of "
                f"{', '.join(good) or 'none, as the port has no address'}",
                f"Unset NCCL_IB_GID_INDEX (NCCL finds it since 2.21){export}; see `show_gids`.",
            ),
        ]
    return rules


def used_ports(fabric: Fabric) -> list[HCAPort]:
    """Return the ports that NCCL_IB_HCA allows; none with NCCL_IB_DISABLE=1."""
    names = matching(fabric.variables.get("NCCL_IB_HCA", ""), (port.name for port in fabric.ports))
    allowed = [port for port in fabric.ports if port.name in names]
    return [] if fabric.variables.get("NCCL_IB_DISABLE") == "1" else allowed


def _port(folder: Path) -> HCAPort:
    gids = {
        int(file.name): _read(folder / "gid_attrs" / "types" / file.name)
        for file in (folder / "gids").glob("*")
        if _read(file).strip("0:")
    }
    return HCAPort(
        f"{folder.parent.parent.name}:{folder.name}",
        _read(folder / "state").rpartition(": ")[2],
        _read(folder / "phys_state").rpartition(": ")[2],
        _read(folder / "link_layer"),
        _read(folder / "rate"),
        dict(sorted(gids.items())),
    )


def _why_closed(devices: Path) -> str:
    """Open the adapters as libibverbs does; return why none can be opened, or nothing."""
    problems = []
    for path in sorted(devices.glob("uverbs*")):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            return ""
        except OSError as error:
            problems.append(f"{path} cannot be opened ({error.strerror})")
    return "; ".join(problems) or f"there is no {devices}/uverbs*"


def _read(file: Path) -> str:
    """Read a one-line file; empty on error (types of empty GIDs raise EINVAL)."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""

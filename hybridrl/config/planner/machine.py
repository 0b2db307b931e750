"""What a machine or cluster has, as plain data, looked up without importing torch."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config.planner import nvidia_smi
from hybridrl.config.planner.cgroup import cgroups

GIB = 2**30

# Threads of torch's operations on the CPU where GPUs do the work. What is left for them is short,
# and they spin between two operations: one per core, in several processes or runs on a host of many
# cores, they would take the cores from the threads that feed the GPUs.
MAX_THREADS_BESIDE_GPU = 8

# First in CUDA_VISIBLE_DEVICES these hide every GPU.
NONE_VISIBLE = ("", "-1")


@dataclass(frozen=True)
class GPU:
    """One GPU: its name and memory in bytes."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Node:
    """One machine: what processes on it may use.

    Attributes:
        name: host name, or what the cluster calls it.
        cores: CPU cores.
        memory_bytes: RAM, or the container's limit where that is lower.
        gpus: in the order of their indices.
        gpu_error: why nvidia-smi, which is there, does not tell the GPUs; empty if it does.
    """

    name: str
    cores: int
    memory_bytes: int
    gpus: tuple[GPU, ...] = ()
    gpu_error: str = ""


@dataclass(frozen=True)
class Machine:
    """The nodes a run may use: one, or those of a Ray cluster."""

    nodes: tuple[Node, ...]

    @property
    def cores(self) -> int:
        """Cores of all nodes."""
        return sum(node.cores for node in self.nodes)

    @property
    def memory_bytes(self) -> int:
        """RAM of all nodes, in bytes."""
        return sum(node.memory_bytes for node in self.nodes)

    @property
    def gpus(self) -> tuple[GPU, ...]:
        """GPUs of all nodes, node by node."""
        return tuple(gpu for node in self.nodes for gpu in node.gpus)

    @property
    def gpu_error(self) -> str:
        """Why no GPU is known although there may be some; empty if one is, or none is there."""
        errors = [f"{node.gpu_error} (on {node.name})" for node in self.nodes if node.gpu_error]
        return errors[0] if errors and not self.gpus else ""

    def describe(self) -> str:
        """One line: '2 nodes, 16 x NVIDIA H200 (140 GiB), 64 cores, 1024 GiB RAM'."""
        nodes = f"{len(self.nodes)} nodes, " if len(self.nodes) > 1 else ""
        names = sorted({f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB)" for gpu in self.gpus})
        none = "GPUs unknown, as nvidia-smi failed" if self.gpu_error else "no NVIDIA GPU"
        gpus = f"{len(self.gpus)} x {' / '.join(names)}" if names else none
        cores = f"{self.cores} core{'s' if self.cores != 1 else ''}"
        return f"{nodes}{gpus}, {cores}, {self.memory_bytes / GIB:.0f} GiB RAM"


def local_machine() -> Machine:
    """This machine as one node."""
    gpus, error = _gpus()
    node = Node(socket.gethostname(), _usable_cores(), memory_limit(), tuple(gpus), error)
    return Machine((node,))


def _usable_cores() -> int:
    """Cores this process may run on: taskset and the like count, CPU shares do not."""
    return len(os.sched_getaffinity(0))


def torch_threads(*, on_gpu: bool, processes: int) -> int:
    """Threads for torch's operations on the CPU, in each of so many processes on this machine."""
    threads = max(1, _usable_cores() // processes)
    return min(threads, MAX_THREADS_BESIDE_GPU) if on_gpu else threads


def memory_limit(root: Path = Path("/")) -> int:
    """RAM in bytes, or the limit of this process's cgroup (v1 or v2) where that is lower."""
    meminfo = (root / "proc/meminfo").read_text()
    total = next(
        int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemTotal:")
    )
    return min([total, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Memory limits of this process's cgroup and of the groups around it."""
    for group in cgroups("memory", root):
        for file in (group / "memory.max", group / "memory.limit_in_bytes"):  # v2, v1
            text = file.read_text().strip() if file.is_file() else ""
            # v2 writes "max", v1 a number near 2^63 where there is no limit.
            if text.isdigit():
                yield int(text)


def _gpus() -> tuple[list[GPU], str]:
    """This machine's NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible; or `Node.gpu_error`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in NONE_VISIBLE:
        return [], ""
    text, error = nvidia_smi.ask("uuid,name,memory.total")
    if error:
        return [], "" if error == nvidia_smi.NOT_THERE else error
    found = parse_nvidia_smi(text)
    if text.strip() and not found:
        first = text.strip().splitlines()[0]
        return [], nvidia_smi.failed(f"it answers {first!r}, expected UUID, name, MiB")
    return visible_gpus(found, visible), ""


def parse_nvidia_smi(text: str) -> list[tuple[str, GPU]]:
    """(UUID, GPU) pairs from lines 'UUID, name, MiB'; other lines are not GPUs we can plan for."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 3 and parts[-1].isdigit():
            found.append((parts[0], GPU(", ".join(parts[1:-1]), int(parts[-1]) * 2**20)))
    return found


def visible_gpus(found: list[tuple[str, GPU]], visible: str | None) -> list[GPU]:
    """Of (UUID, GPU) pairs those that CUDA_VISIBLE_DEVICES names, in its order.

    Args:
        found: in the order of their indices.
        visible: indices or UUID prefixes, separated by commas; None: all. As in CUDA, the first
            entry that names no GPU hides the rest.
    """
    if visible is None:
        return [gpu for _, gpu in found]
    chosen: list[GPU] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit() and int(entry) < len(found):
            chosen.append(found[int(entry)][1])
        elif entry and (named := [gpu for uuid, gpu in found if uuid.startswith(entry)]):
            chosen.append(named[0])
        else:
            break
    return chosen
